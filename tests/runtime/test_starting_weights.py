"""Starting weights from files that transformers and Isthmus write; files that do not fit are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

import isthmus
from isthmus.errors import DataError
from isthmus.model.job import Job, Optimizer
from isthmus.runtime.checkpoint.reading import export_folder, latest, open_checkpoint
from isthmus.runtime.data.sample_order import SampleOrder
from isthmus.runtime.data.sources import open_samples
from isthmus.runtime.starting_weights import StartingWeights
from isthmus.runtime.worker_run import build_model
from tests.deploy.jobs import two_devices
from tests.deploy.models import watched

transformers = pytest.importorskip("transformers")


def tiny(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded folder as transformers writes it."""
    tiny(seed=7).save_pretrained(tmp_path / "llama", max_shard_size="12KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 1
    return tmp_path / "llama"


def test_a_sharded_folder_and_a_single_file(folder: Path, tmp_path: Path) -> None:
    wanted = transformers.LlamaForCausalLM.from_pretrained(folder, local_files_only=True).state_dict()
    save_model(tiny(seed=7), str(tmp_path / "one.safetensors"))
    for path in (folder, tmp_path / "one.safetensors"):
        model = tiny(seed=1)
        StartingWeights(path).load(model)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_only_what_is_wanted_is_read(folder: Path) -> None:
    model, before = tiny(seed=1), tiny(seed=1).state_dict()
    StartingWeights(folder).load(model, {"model.norm.weight", "model.embed_tokens.weight"})
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"model.embed_tokens.weight", "lm_head.weight"}  # norms are ones in both


def test_numbers_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Quantized weights would otherwise be read as if they were the numbers themselves."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for name, dtype in (("0.weight", torch.int8), ("0.weight", torch.complex64), ("1.num_batches_tracked", torch.half)):
        tensors = module.state_dict()
        save_file({**tensors, name: tensors[name].to(dtype)}, tmp_path / "w.safetensors")
        with pytest.raises(DataError, match=f"{name} holds another kind of numbers"):
            StartingWeights(tmp_path / "w.safetensors").check(module)
    save_file({**module.state_dict(), "0.weight": torch.ones(2, 2, dtype=torch.half)}, tmp_path / "w.safetensors")
    StartingWeights(tmp_path / "w.safetensors").load(module)
    assert torch.equal(module[0].weight, torch.ones(2, 2))  # type: ignore[arg-type]


def test_two_values_for_one_parameter_are_refused(folder: Path, tmp_path: Path) -> None:
    save_model(tiny(seed=7), str(tmp_path / "w.safetensors"))
    tensors = load_file(tmp_path / "w.safetensors")
    both = {"lm_head.weight": torch.zeros(64, 32), "model.embed_tokens.weight": torch.ones(64, 32)}
    save_file(tensors | both, tmp_path / "w.safetensors")
    with pytest.raises(DataError, match=r"two tensors for one tied parameter.*differ"):
        StartingWeights(tmp_path / "w.safetensors").load(tiny())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["more"] = "more.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"model.norm.weight": torch.ones(32)}, folder / "more.safetensors")
    with pytest.raises(DataError, match=r"two files hold model.norm.weight. Found model-.* and more.safetensors"):
        StartingWeights(folder)


def test_names_that_cannot_be_files(folder: Path) -> None:
    with pytest.raises(DataError, match="no such weights"):
        StartingWeights(Path("x" * 5000))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(DataError, match="names a file that is not there"):
        StartingWeights(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lack model.norm.weight"),
        (lambda tensors: tensors.update({"model.more": torch.ones(2)}), "the model does not have. Found model.more"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}), "model.norm.weight has another shape"),
    ],
)
def test_other_tensors_are_refused_by_name(change: Any, said: str, tmp_path: Path) -> None:
    save_model(tiny(), str(tmp_path / "w.safetensors"))
    tensors = load_file(tmp_path / "w.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(DataError, match="(?s)" + said.replace(".", r"\.")):
        StartingWeights(tmp_path / "w.safetensors").check(tiny())


def test_files_that_are_no_weights(folder: Path, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path / "pytorch_model.bin", "not a safetensors file"),
        (tmp_path / "empty", "has no weights"),
        (tmp_path / "none", "no such weights"),
    ):
        with pytest.raises(DataError, match=said):
            StartingWeights(path)
    index = folder / "model.safetensors.index.json"
    for map_, said in (({"a": "../x.safetensors"}, "not there"), ("no map", "cannot be read")):
        index.write_text(json.dumps({"weight_map": map_}))
        with pytest.raises(DataError, match=said):
            StartingWeights(folder)


@pytest.mark.slow("starts processes")
def test_parameters_that_no_loss_reaches_come_from_the_file(tmp_path: Path) -> None:
    torch.manual_seed(99)
    module, _ = watched()
    save_model(module, str(tmp_path / "w.safetensors"))
    named = "tests.deploy.models:watched", "tests.deploy.models:vectors"
    job = Job(
        name="watched", model=named[0], data=named[1], weights=str(tmp_path / "w.safetensors"), batch=8, steps=1,
        precision="fp32", optimizer=Optimizer(learning_rate=1e-3),
    )  # fmt: skip
    choice = isthmus.plan(job, two_devices(), planner="data-even", calls=10)
    result = isthmus.train(
        choice.plan, two_devices(), trusted=named, checkpoint=tmp_path / "run", export=tmp_path / "out.safetensors"
    )
    example, target = open_samples(job, build_model(job)[0]).get(range(8))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(module(*example.args), target)
    assert result.losses == pytest.approx([float(loss)], rel=1e-5)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["first.weight"], module.state_dict()["first.weight"])


@pytest.mark.slow("starts processes")
def test_fine_tuning_starts_where_transformers_does_and_loads_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(
        name="tune", model="hf:llama/config.json", weights="llama", batch=4, sequence=8, steps=2, precision="fp32",
        optimizer=Optimizer(learning_rate=1e-3),
    )  # fmt: skip
    choice = isthmus.plan(job, two_devices(), planner="pipeline", calls=60)
    result = isthmus.train(choice.plan, two_devices(), checkpoint=tmp_path / "run")
    built, loss = build_model(job)
    samples = open_samples(job, built)
    example, target = samples.get(SampleOrder(seed=job.seed, count=samples.count).numbers(0, job.batch))
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, local_files_only=True)
    total, count = loss(theirs(*example.args, **example.kwargs).logits, target)
    assert result.losses[0] == pytest.approx(float(total.detach()) / float(count), rel=1e-5)

    checkpoint = open_checkpoint(latest(tmp_path / "run"))  # type: ignore[arg-type]
    back = transformers.LlamaForCausalLM.from_pretrained(
        export_folder(checkpoint, tmp_path / "tuned"), local_files_only=True
    ).eval()
    own = tiny()
    StartingWeights(tmp_path / "tuned").load(own)
    tokens = torch.arange(8)[None]
    assert torch.equal(back(tokens).logits, own.eval()(tokens).logits)
    assert not torch.equal(back(tokens).logits, theirs.eval()(tokens).logits), "it was trained"
