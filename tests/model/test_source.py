"""Where models come from: every form, and every way to be wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from isthmus.errors import FileError, IsthmusError, ModelError
from isthmus.model.digest import digest_of
from isthmus.model.graph import Block, BlockGraph, Linear, Parameter, Tensor, TensorSplit
from isthmus.model.source import Config, Function, SavedModel, Zoo, build, load_graph, parse, read_graph, save_graph

TINY = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 64}
BERT_TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 34,
}
T5_TINY = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64, "n_positions": 512}
VIT_TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 16,
}

USER_CODE = """
import torch
from torch import nn

def alone(): return nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2))
def pair(): return nn.Conv2d(3, 4, 3), (torch.zeros(1, 3, 8, 8),)
def single(): return nn.Linear(6, 3), torch.zeros(5, 6)
def named(): return nn.Linear(6, 3), {"input": torch.zeros(5, 6)}
def embedding(): return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
def sized(sequence=7): return nn.Linear(6, 3), torch.zeros(2, sequence, 6)
def conv(): return nn.Conv2d(3, 4, 3)
def number(): return 3
def numbers(): return nn.Linear(6, 3), (1, 2)
def nothing(): return nn.Linear(6, 3), ()
def uneven(): return nn.Bilinear(6, 6, 3), (torch.zeros(2, 6), torch.zeros(3, 6))
def scalar(): return nn.Linear(6, 3), torch.zeros(())
def fails(): raise RuntimeError("out of luck")
def needs(width): return nn.Linear(width, 3)
constant = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of the user's, `usercode`, and a cache of its own."""
    (tmp_path / "usercode.py").write_text(USER_CODE)
    (tmp_path / "brokencode.py").write_text("import no_such_module_anywhere")
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "usercode", raising=False)
    return tmp_path


def config(folder: Path, fields: object) -> str:
    path = folder / "some-model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(fields))
    return f"hf:{path}"


def test_each_form_is_told_by_its_name() -> None:
    assert parse("zoo:gpt2") == Zoo(name="gpt2")
    assert parse("hf:some/config.json") == Config(path=Path("some/config.json"))
    assert parse("my.package:model") == Function(module="my.package", function="model")
    assert parse("some/model.json") == SavedModel(path=Path("some/model.json"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gpt2-xl", "Try zoo:gpt2-xl"),
        ("gpt2xl", "Try zoo:gpt2"),
        ("zoo:gpt2-xxl", "Did you mean zoo:gpt2-xl"),
        ("zoo:gpt9", "llama3-8b, llama3-70b"),
        ("zoo:", "The zoo has no such model"),
        ("hf:", "names no model"),
        ("", "names no model"),
        ("a b:c", "names no model"),
        ("package.module:", "names no model"),
        ("os:system('true')", "names no model"),
    ],
)
def test_what_names_no_model_is_said(spec: str, said: str) -> None:
    with pytest.raises(ModelError) as error:
        parse(spec)
    assert said in str(error.value)


@given(st.text(max_size=30))
def test_any_text_is_a_source_or_our_error(spec: str) -> None:
    try:
        assert isinstance(parse(spec), (Zoo, Config, Function, SavedModel))
    except IsthmusError as error:
        assert error.expected


@pytest.mark.parametrize(
    ("function", "inputs"),
    [("alone", (2, 6)), ("pair", (2, 3, 8, 8)), ("single", (2, 6)), ("named", (2, 6)), ("sized", (2, 7, 6))],
)
def test_functions_give_models_in_each_form(function: str, inputs: tuple[int, ...]) -> None:
    built = build(f"usercode:{function}")
    example = built.example(2)
    assert [tuple(value.shape) for value in (*example.args, *example.kwargs.values())] == [inputs]
    assert len(built.module(*built.example(7).args, **built.example(7).kwargs)) == 7
    with pytest.raises(ModelError, match="no synthetic targets"):
        built.targets(2)


def test_the_sequence_reaches_functions_that_take_one() -> None:
    assert build("usercode:sized", 11).example(3).args[0].shape == (3, 11, 6)
    assert build("usercode:embedding", 11).example(3).args[0].shape == (3, 11)
    with pytest.raises(ModelError, match="argument named sequence"):
        build("usercode:pair", 11)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere_to_be_found:model", "cannot be imported"),
        ("brokencode:model", "no_such_module_anywhere"),
        ("usercode:missing", "usercode has no function 'missing'. Did you mean 'single'?"),
        ("usercode:constant", "constant = 3"),
        ("usercode:fails", "RuntimeError: out of luck"),
        ("usercode:needs", "called without arguments"),
        ("usercode:number", "returned no model"),
        ("usercode:numbers", "not tensors. Found int, int"),
        ("usercode:nothing", "not tensors. Found nothing"),
        ("usercode:uneven", "no common batch dimension"),
        ("usercode:scalar", "no common batch dimension"),
        ("usercode:conv", "needs example inputs"),
        ("usercode:embedding", "--sequence N"),
    ],
)
def test_functions_that_give_no_model_are_said(spec: str, said: str) -> None:
    with pytest.raises(ModelError) as error:
        build(spec)
    assert said in str(error.value)


def test_a_function_is_captured_once(folder: Path) -> None:
    graph = load_graph("usercode:alone")
    assert (graph.name, graph.elements) == ("usercode:alone", 6 * 3 + 3 + 3 * 2 + 2)
    assert load_graph("usercode:alone") == graph
    assert len(list((folder / "cache").iterdir())) == 1


def test_changed_code_is_captured_anew(folder: Path) -> None:
    load_graph("usercode:alone")
    (folder / "usercode.py").write_text(USER_CODE.replace("nn.ReLU()", "nn.Identity()"))
    del sys.modules["usercode"]
    load_graph("usercode:alone")
    assert len(list((folder / "cache").iterdir())) == 2


class TestConfigurations:
    """hf:CONFIG.json; in one class, for importing transformers takes seconds."""

    @pytest.fixture(autouse=True)
    def transformers(self) -> None:
        pytest.importorskip("transformers")

    @pytest.mark.parametrize(
        ("fields", "kind", "sequence"),
        [
            ({"model_type": "gpt2", **TINY}, "GPT2LMHeadModel", 32),
            ({"model_type": "bert", "architectures": ["BertForMaskedLM"], **BERT_TINY}, "BertForMaskedLM", 32),
            ({"model_type": "bert", "architectures": ["BertForPreTraining"], **BERT_TINY}, "BertForMaskedLM", 32),
            ({"model_type": "t5", **T5_TINY}, "T5ForConditionalGeneration", 512),
            ({"model_type": "vit", **VIT_TINY}, "ViTForImageClassification", None),
        ],
    )
    def test_the_model_follows_the_architecture(
        self, folder: Path, fields: dict[str, Any], kind: str, sequence: int | None
    ) -> None:
        built = build(config(folder, fields))
        assert (type(built.module).__name__, built.name, built.sequence) == (kind, "some-model", sequence)
        total, number = built.loss(built.module(**built.example(2).kwargs), built.targets(2))
        assert torch.isfinite(total)
        assert number > 0

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ([1], "not a transformers configuration"),
            ({"n_layer": 1}, 'a "model_type"'),
            ({"model_type": 3}, 'a "model_type"'),
            ({"model_type": "no-such-type"}, "no-such-type"),
            ({"model_type": "gpt2", "n_layer": "many"}, "cannot build"),
            ({"model_type": "bert", "architectures": ["BertForQuestionAnswering"]}, "no trainer"),
        ],
    )
    def test_wrong_configurations_are_said(self, folder: Path, fields: object, said: str) -> None:
        with pytest.raises(ModelError) as error:
            build(config(folder, fields))
        assert said in str(error.value)

    def test_files_that_are_none_are_said(self, folder: Path) -> None:
        (folder / "large.json").write_bytes(b" " * 1_100_000)
        for path, said in (("absent.json", "No such file"), (".", "Found a folder"), ("large.json", "too large")):
            with pytest.raises(ModelError, match=said):
                load_graph(f"hf:{path}")

    def test_code_that_a_configuration_names_is_never_run(self, folder: Path) -> None:
        (folder / "evil.py").write_text("raise SystemExit('ran')")
        remote = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        built = build(config(folder, {"model_type": "gpt2", "auto_map": remote, **TINY}))
        assert type(built.module).__module__.startswith("transformers.")
        assert "evil" not in sys.modules
        with pytest.raises(ModelError):
            build(config(folder, {"model_type": "evil", "auto_map": remote}))

    def test_the_sequence_is_held_to_the_positions(self, folder: Path) -> None:
        spec = config(folder, {"model_type": "gpt2", **TINY})
        assert build(spec, 20).example(3).kwargs["input_ids"].shape == (3, 20)
        with pytest.raises(ModelError, match="1 to 32"):
            build(spec, 33)
        with pytest.raises(ModelError, match="no sequence"):
            build(config(folder, {"model_type": "vit", **VIT_TINY}), 33)

    def test_a_configuration_is_captured(self, folder: Path) -> None:
        graph = load_graph(config(folder, {"model_type": "gpt2", **TINY}), sequence=16)
        assert (graph.name, graph.sequence) == ("some-model", 16)
        with torch.device("meta"):
            module = build(config(folder, {"model_type": "gpt2", **TINY})).module
        assert graph.elements == sum(parameter.numel() for parameter in module.parameters())


def test_absent_transformers_says_how_to_get_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'isthmus\[hf\]'"):
        build(config(folder, {"model_type": "gpt2", **TINY}))


def small_graph() -> BlockGraph:
    weights = [
        Parameter(name=f"{i}.w", elements=6, shape=(2, 3), linear=Linear(rows=1, inputs=3, outputs=2)) for i in (0, 1)
    ]
    blocks = [
        Block(
            name=f"b{i}",
            digest="d",
            parameters=(weight.name,),
            forward_flops=12,
            backward_flops=24,
            saved=3,
            moved=5,
            weights_moved=6,
            operations=1,
        )
        for i, weight in enumerate(weights)
    ]
    tensors = (
        Tensor(name="x", source=-1, targets=(0,), elements=3, grad=False),
        Tensor(name="y", source=0, targets=(1,), elements=2),
    )
    graph = BlockGraph(name="small", blocks=tuple(blocks), tensors=tensors, parameters=tuple(weights), sequence=None)
    return msgspec.structs.replace(graph, digest=digest_of(graph))


def test_a_saved_model_is_read_as_written(folder: Path) -> None:
    graph = small_graph()
    save_graph(graph, folder / "m.json")
    again = read_graph(folder / "m.json")
    assert again == graph
    assert digest_of(again) == graph.digest  # 12 was written where 12.0 is read
    assert load_graph(str(folder / "m.json")) == graph
    with pytest.raises(ModelError, match="another sequence"):
        load_graph(str(folder / "m.json"), sequence=5)
    with pytest.raises(ModelError, match="no code to build"):
        build(str(folder / "m.json"))


def test_the_digest_sees_all_but_the_name() -> None:
    graph = small_graph()
    assert digest_of(msgspec.structs.replace(graph, name="other", digest="x")) == graph.digest
    for change in ({"sequence": 3}, {"buffers": 1}, {"how": "modules"}, {"tensors": graph.tensors[:1]}):
        assert digest_of(msgspec.structs.replace(graph, **change)) != graph.digest


def first_block(**fields: object) -> dict[str, object]:
    """The small graph's blocks, with other fields in the first."""
    one, *rest = small_graph().blocks
    return {"blocks": (msgspec.structs.replace(one, **fields), *rest)}


def first_parameter(**fields: object) -> dict[str, object]:
    one, *rest = small_graph().parameters
    changes = {"name": "0.w", **fields}
    blocks = first_block(parameters=(changes["name"],))
    return {"parameters": (msgspec.structs.replace(one, **changes), *rest), **blocks}


def split(**fields: object) -> TensorSplit:
    whole = TensorSplit(parameters=("0.w",), flops=1.0, saved=1.0, reduces=1, elements=1.0)
    return msgspec.structs.replace(whole, **fields)


def changed(graph: BlockGraph, **fields: object) -> BlockGraph:
    """The graph with other fields, under a digest that is right: only the inner checks can object."""
    return msgspec.structs.replace(graph, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"blocks": ()}, "no blocks"),
        ({"parameters": small_graph().parameters[:1]}, "uses the parameter 1.w"),
        ({"parameters": (*small_graph().parameters, small_graph().parameters[0])}, "same name"),
        ({"blocks": small_graph().blocks[:1]}, r"from block 0 to \(1,\) of 1"),
        ({"tensors": (Tensor(name="z", source=1, targets=(0,), elements=1),)}, r"from block 1 to \(0,\)"),
        ({"tensors": (Tensor(name="z", source=-2, targets=(), elements=1),)}, "from block -2"),
        ({"tensors": (Tensor(name="z", source=0, targets=(1,), elements=-1),)}, "z has elements -1.0"),
        ({"tensors": (Tensor(name="z", source=0, targets=(1,), elements=1, fixed=-2),)}, "z has fixed -2.0"),
        ({"tensors": (Tensor(name="z", source=0, targets=(1, 1), elements=1),)}, r"to \(1, 1\)"),
        ({"tensors": (Tensor(name="z", source=0, targets=(1,), elements=1, width=0),)}, "elements of 0 bytes"),
        ({"buffers": -1}, "buffers -1"),
        ({"outputs": -1.0}, "outputs -1.0"),
        (first_block(forward_flops=-1e15), "b0 has forward_flops -1"),
        (first_block(saved=-1.0), "b0 has saved -1.0"),
        (first_block(workspace=-1.0), "b0 has workspace -1.0"),
        (first_block(operations=-5), "b0 has operations -5"),
        (first_block(parameters=("0.w", "0.w")), "lists a parameter twice"),
        (first_block(name=""), "a block has the name ''"),
        (first_block(tensor=split(parameters=("nope",))), "splits the parameter nope"),
        (first_block(tensor=split(heads=-3)), "heads -3"),
        (first_block(tensor=split(elements=-1.0)), "split of block b0 has elements -1.0"),
        (first_parameter(name="[b0]"), "a parameter has the name"),
        (first_parameter(linear=Linear(rows=-1.0, inputs=3, outputs=2)), "rows -1.0"),
        (
            {"parameters": (Parameter(name="0.w", elements=5, shape=(2, 3)), *small_graph().parameters[1:])},
            "5 elements",
        ),
    ],
)
def test_graphs_that_contradict_themselves_are_refused(folder: Path, fields: dict[str, object], said: str) -> None:
    save_graph(changed(small_graph(), **fields), folder / "m.json")
    with pytest.raises(FileError, match=said):
        read_graph(folder / "m.json")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"kind": "model"', '"kind": "plan"', "isthmus simulate"),
        ('"version": 1', '"version": 2', "newer"),
        ('"sequence": null', '"sequence": 7', "does not match its digest"),
        ('"sequence": null', '"sequence": "long"', "sequence"),
        ('"sequence": null', '"sequence": null, "code": "import os"', "does not know"),
        ('"name": "b0"', '"name": "b0", "code": 1', "does not know"),
        ('"source": -1', '"source": -1, "source": 0', "twice"),
        ('"saved": 3', '"saved": NaN', "NaN"),
    ],
)
def test_files_that_were_changed_are_refused(folder: Path, old: str, new: str, said: str) -> None:
    path = folder / "m.json"
    save_graph(small_graph(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(FileError, match=said):
        read_graph(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_our_error_or_the_same_graph(folder: Path, data: st.DataObject) -> None:
    path = folder / "m.json"
    save_graph(small_graph(), path)
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:start] + data.draw(st.binary(max_size=3)) + whole[start + data.draw(st.integers(0, 5)) :])
    try:
        found = read_graph(path)
    except FileError as error:
        assert str(path) in str(error)
    else:
        assert found.digest == small_graph().digest


def test_the_module_is_built_where_asked() -> None:
    with torch.device("meta"):
        assert build("zoo:mlp-tiny").example(2).args[0].is_meta
    assert isinstance(build("zoo:mlp-tiny").module, nn.Module)
