"""Checkpoints read back: any part of a tensor from any pieces of it, and the original model from an exported file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from isthmus.errors import CheckpointError, UsageError
from isthmus.model import zoo
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Optimizer
from isthmus.model.source import load_graph
from isthmus.model.tensor_parallel.member_slices import ParameterSlice
from isthmus.runtime.checkpoint import saving
from isthmus.runtime.checkpoint.reading import (
    Checkpoint,
    Header,
    MemberCut,
    Piece,
    SavedScale,
    Saver,
    clear,
    export,
    finish,
    latest,
    open_checkpoint,
    write_part,
)
from isthmus.runtime.checkpoint.tensor_file import DTYPES, TensorEntry, open_tensors, write_tensors
from tests.quiet import PATIENCE
from tests.runtime.saved_states import (
    SHAPES,
    assert_holds,
    folder_in_memory,
    graph_of,
    halves,
    header,
    parts_of,
    save,
    state_of,
)

SGD = Job(name="small", model="zoo:mlp-tiny", batch=8, optimizer=Optimizer(name="sgd"))


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


def part_of(tensor: Tensor, cut: MemberCut | None) -> Tensor:
    """The part by torch's own splitting, and by what the blocks of tensor groups use."""
    if cut is None:
        return tensor.reshape(-1)
    sections = tensor.split(list(cut.sections), cut.dim)
    part = torch.cat([section.chunk(cut.members, cut.dim)[cut.member] for section in sections], cut.dim)
    piece = ParameterSlice(dim=cut.dim, sections=cut.sections, member=cut.member, members=cut.members)
    assert MemberCut.of(piece) == cut and torch.equal(piece.cut(tensor), part)
    return part.reshape(-1)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, tuple[int, ...], int]]]:
    """A shape, and two ways to cut it: (dim, sections, members), members 1 for not at all."""
    members, dim = draw(st.tuples(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 4), (3, 3), (4, 2)]), st.integers(0, 2)))
    unit = max(members) if set(members) != {1} else 1
    sections = tuple(unit * n for n in draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    shape[dim] = sum(sections)
    return tuple(shape), [(dim, sections, n) for n in members]


def cuts_of(way: tuple[int, tuple[int, ...], int]) -> list[MemberCut | None]:
    dim, sections, members = way
    if members == 1:
        return [None]
    return [MemberCut(dim=dim, sections=sections, member=member, members=members) for member in range(members)]


@settings(max_examples=40)
@given(data=st.data(), tensor=cut_tensors())
def test_any_part_is_read_from_any_pieces(
    data: st.DataObject, tensor: tuple[tuple[int, ...], list[tuple[int, tuple[int, ...], int]]]
) -> None:
    """Saved by the members of a tensor group, each part further sharded; read by another group, sharded otherwise."""
    shape, (saved, wanted) = tensor
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    pieces = []
    for cut in cuts_of(saved):
        part = part_of(whole, cut)
        places = sorted({0, part.numel(), *data.draw(st.lists(st.integers(0, part.numel()), max_size=3))})
        for lo, hi in pairwise(places):
            pieces.append(Piece(parameter="x", quantity="weight", shape=shape, data=part[lo:hi], start=lo, cut=cut))
    owners = [data.draw(st.integers(0, 2)) for _ in pieces]
    with folder_in_memory() as folder:
        parts = [
            write_part(folder, 1, f"h/k/{owner}", [p for p, of in zip(pieces, owners, strict=True) if of == owner])
            for owner in sorted(set(owners))
        ]
        checkpoint = open_checkpoint(finish(folder, parts, header(1, graph_of({"x": shape}), SGD)))
        assert torch.equal(checkpoint.read("x"), whole.reshape(-1))
        for cut in cuts_of(wanted):
            part = part_of(whole, cut)
            lo, hi = sorted(data.draw(st.tuples(*[st.integers(0, part.numel())] * 2)))
            assert torch.equal(checkpoint.read("x", "weight", lo, hi, cut), part[lo:hi])


def test_cut_along_another_dimension(folder: Path) -> None:
    whole = torch.randn(4, 6)
    rows = [MemberCut(dim=0, sections=(4,), member=member, members=2) for member in range(2)]
    pieces = [Piece(parameter="x", quantity="weight", shape=(4, 6), data=part_of(whole, c), cut=c) for c in rows]
    graph = graph_of({"x": (4, 6)})
    checkpoint = open_checkpoint(finish(folder, [write_part(folder, 1, "w", pieces)], header(1, graph, SGD)))
    for member in range(3):
        cut = MemberCut(dim=1, sections=(6,), member=member, members=3)
        assert torch.equal(checkpoint.read("x", cut=cut), part_of(whole, cut))
    with pytest.raises(UsageError, match="no such part"):
        checkpoint.read("x", cut=MemberCut(dim=1, sections=(6,), member=0, members=4))
    with pytest.raises(UsageError, match="no such part"):
        checkpoint.read("x", start=3, stop=25)


def test_what_is_saved_is_what_is_read(folder: Path) -> None:
    state = state_of(3)
    path = save(folder, 3, state)
    assert path.name == "step-00000003"
    assert sorted(file.name for file in path.iterdir()) == [
        "here+T4+0.safetensors",
        "manifest.json",
        "there+T4+0.safetensors",
    ]
    checkpoint = open_checkpoint(path, verify=True)
    assert_holds(checkpoint, state)
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.updates, manifest.samples, manifest.precision) == (3, 3, 24, "fp32")
    assert set(checkpoint.names("exp_avg")) == set(SHAPES)
    with pytest.raises(CheckpointError, match="no momentum of 'scale'"):
        checkpoint.read("scale", "momentum")


def test_the_loss_scale_and_a_run_before_its_first_update(folder: Path) -> None:
    """fp16 steps that overflowed made no update, so there are no moments yet."""
    job = Job(name="small", model="zoo:mlp-tiny", batch=8, precision="fp16")
    top = Header.of(
        graph_of({"x": (3,)}),
        step=2,
        job=job,
        precision="fp16",
        updates=0,
        samples=16,
        loss_scale=SavedScale(value=2.0),
    )
    piece = Piece(parameter="x", quantity="weight", shape=(3,), data=torch.ones(3))
    checkpoint = open_checkpoint(finish(folder, [write_part(folder, 2, "w", [piece])], top))
    assert checkpoint.manifest.loss_scale == SavedScale(value=2.0, steps=0)
    assert checkpoint.manifest.job == job


def test_only_the_files_that_are_needed_are_read(folder: Path) -> None:
    """The other worker's file goes away after the sizes were checked; one's own half can be read all the same."""
    state = state_of(1)
    checkpoint = open_checkpoint(save(folder, 1, state))
    (checkpoint.path / "there+T4+0.safetensors").unlink()
    mine = state["in.weight", "weight"].reshape(-1)
    assert torch.equal(checkpoint.read("in.weight", "weight", 5, 96), mine[5:96])
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoint.read("in.weight", "weight", 5, 97)


def test_a_small_part_of_a_large_tensor_costs_little_memory(folder: Path) -> None:
    size = 32_000_000
    piece = Piece(parameter="x", quantity="weight", shape=(size,), data=torch.zeros(size))
    part = write_part(folder, 1, "w", [piece])
    del piece
    path = finish(folder, [part], header(1, graph_of({"x": (size,)}), SGD))
    before = _resident()
    assert open_checkpoint(path).read("x", "weight", size - 10, size).numel() == 10
    assert _resident() - before < 16e6


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096.0


def test_the_latest_is_found_and_older_ones_go(folder: Path) -> None:
    assert latest(folder) is None and latest(folder / "none") is None
    for step in (5, 10, 15):
        save(folder, step)
    (folder / "step-notes").mkdir()
    parts_of(folder, 20, state_of(20))  # under way
    parts_of(folder, 12, state_of(12))  # left by a run that ended
    names = lambda: sorted(path.name for path in folder.iterdir())  # noqa: E731
    save(folder, 16)
    assert names() == ["step-00000015", "step-00000016", "step-00000020.partial", "step-notes"]
    assert latest(folder) == folder / "step-00000016"
    save(folder, 11, keep=1)  # resumed further back: what is newer stays
    assert names() == ["step-00000011", "step-00000015", "step-00000016", "step-00000020.partial", "step-notes"]
    clear(folder)
    assert "step-00000020.partial" not in names()
    with pytest.raises(CheckpointError, match="step-00000016"):
        open_checkpoint(folder)


def test_a_step_is_saved_again(folder: Path) -> None:
    save(folder, 4, state_of(1))
    path = save(folder, 4, state_of(2))
    assert_holds(open_checkpoint(path, verify=True), state_of(2))
    assert [item.name for item in folder.iterdir()] == ["step-00000004"]


def test_what_an_ended_run_left_in_a_partial_folder_is_not_taken_along(folder: Path) -> None:
    write_part(folder, 6, "gone/T4/0", [])
    path = save(folder, 6)
    assert not (path / "gone+T4+0.safetensors").exists()


def test_the_saver_writes_while_training_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, entered = threading.Event(), threading.Event()

    def slow(*arguments: object) -> object:
        entered.set()
        assert go.wait(10)
        return write_tensors(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "write_tensors", slow)
    saver = Saver(folder, "w")
    pieces = [piece for half in halves(state_of(1)) for piece in half]
    saver.save(1, pieces)
    assert entered.wait(10) and saver.saved() == []  # it is being written, and we are here
    second = threading.Thread(target=saver.save, args=(2, pieces))
    second.start()
    second.join(0.05)
    assert second.is_alive()  # one at a time
    go.set()
    second.join(PATIENCE)
    saved = [*saver.saved(wait=True), *saver.close()]
    assert [item.step for item in saved] == [1, 2]
    assert_holds(open_checkpoint(finish(folder, [saved[1].part], header(2))), state_of(1))


def test_an_error_of_the_saver_is_raised_by_the_next_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> object:
        raise OSError(28, "No space left on device")

    pieces = halves(state_of(1))[0]
    for ask in ("save", "saved", "close"):
        saver = Saver(folder, "w")
        with monkeypatch.context() as patch:
            patch.setattr(saving, "write_tensors", full)
            saver.save(1, pieces)
            while saver._future and not saver._future.done():
                pass
        with pytest.raises(CheckpointError, match="No space left"):
            {"save": lambda s=saver: s.save(2, pieces), "saved": saver.saved, "close": saver.close}[ask]()
        assert saver.close() == []


@pytest.mark.parametrize(
    "data", [torch.ones(2, 2), torch.ones(4, dtype=torch.complex128), torch.ones(4, device="meta")]
)
def test_what_cannot_be_saved_is_said(data: Tensor, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be saved in this form"):
        write_part(folder, 1, "w", [Piece(parameter="x", quantity="weight", shape=(4,), data=data)])


@given(data=st.data())
@settings(max_examples=25)
def test_our_safetensors_files_are_safetensors_files(data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    entries = data.draw(
        st.dictionaries(st.text(min_size=1), st.builds(TensorEntry, st.sampled_from([*DTYPES]), shapes))
    )
    tensors = {name: torch.randint(0, 2, shape).to(DTYPES[dtype]) for name, (dtype, shape) in entries.items()}
    with folder_in_memory() as folder:
        path = folder / "x.safetensors"
        written = write_tensors(path, entries, tensors.__getitem__, {"some": "thing"})
        assert written.bytes == path.stat().st_size
        for found in (load_file(path), open_tensors(path, entries)):
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensors[name]) for name in tensors)
            assert all(found[name].dtype == tensors[name].dtype for name in tensors)
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"some": "thing"}


def saved_model(folder: Path, model: nn.Module, graph: BlockGraph, precision: str = "fp32") -> Checkpoint:
    """Weights in fp32, as master copies are, and the buffers that the model's state has."""
    trained = {parameter.name for parameter in graph.parameters}
    ties = {name for parameter in graph.parameters for name in parameter.ties}
    pieces = [
        Piece(
            parameter=name,
            quantity="weight" if name in trained else "buffer",
            shape=tuple(tensor.shape),
            data=tensor.reshape(-1).clone(),
        )
        for name, tensor in model.state_dict().items()
        if name not in ties
    ]
    top = Header.of(graph, step=1, job=SGD, precision=precision, updates=1, samples=8)  # type: ignore[arg-type]
    return open_checkpoint(finish(folder, [write_part(folder, 1, "w", pieces)], top))


@pytest.mark.parametrize("name", ["gpt-tiny", "cnn-tiny"])
def test_the_original_model_loads_what_is_exported(name: str, folder: Path) -> None:
    """A tied head; batch statistics and their count."""
    graph = load_graph(f"zoo:{name}")
    model, other = (zoo.build(name) for _ in range(2))
    if name == "cnn-tiny":
        model.module(*model.example(4).args)  # statistics that are not those of the beginning
    checkpoint = saved_model(folder, model.module, graph)
    checkpoint.fits(graph)
    path = export(checkpoint, folder / "model.safetensors")
    load_model(other.module, path)  # strict: nothing is missing, nothing too many
    given_, back = model.module.state_dict(), other.module.state_dict()
    assert all(torch.equal(given_[key], back[key]) for key in given_)
    if name == "gpt-tiny":
        assert other.module.lm_head.weight is other.module.transformer.wte.weight
        third = zoo.build(name).module
        result = third.load_state_dict(load_file(path), strict=False)
        assert result.missing_keys == ["lm_head.weight"] and not result.unexpected_keys  # the other name of the first
        assert torch.equal(third.lm_head.weight, model.module.lm_head.weight)
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt", "lm_head.weight": "transformer.wte.weight"}


def test_an_export_in_the_jobs_precision_or_in_fp32(folder: Path) -> None:
    model = zoo.build("cnn-tiny").module
    graph = load_graph("zoo:cnn-tiny")
    checkpoint = saved_model(folder, model, graph, "bf16")
    state, trained = model.state_dict(), {parameter.name for parameter in graph.parameters}
    for precision, dtype in ((None, torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        found = load_file(export(checkpoint, folder / "x.safetensors", precision))
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor.to(dtype) if name in trained else tensor)


def test_transformers_loads_what_is_exported(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config).eval()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    checkpoint = saved_model(folder, model, graph_of(shapes, {"transformer.wte.weight": ("lm_head.weight",)}))
    exported = folder / "exported"
    exported.mkdir()
    config.save_pretrained(exported)
    export(checkpoint, exported / "model.safetensors")
    other = transformers.GPT2LMHeadModel(config).eval()
    load_model(other, exported / "model.safetensors")
    third = transformers.GPT2LMHeadModel.from_pretrained(exported, local_files_only=True).eval()
    tokens = torch.arange(10)[None]
    for loaded in (other, third):
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_buffers_that_differ_are_named(folder: Path) -> None:
    old = Piece(parameter="old", quantity="buffer", shape=(3,), data=torch.ones(3))
    parts = [*parts_of(folder, 1, state_of(1)), write_part(folder, 1, "more", [old])]
    checkpoint = open_checkpoint(finish(folder, parts, header(1)))
    assert checkpoint.compare_buffers({"old": (3,)}) == ()
    new, gone = checkpoint.compare_buffers({"shift": (2,)})
    assert "no buffer 'shift': it keeps the value" in new and "no buffer 'old' any more" in gone
    with pytest.raises(CheckpointError, match=r"buffer 'old' has another shape. Found \(3,\). Expected \(5,\)"):
        checkpoint.compare_buffers({"old": (5,)})


def test_a_checkpoint_of_another_model_is_refused(folder: Path) -> None:
    checkpoint = open_checkpoint(save(folder, 1))
    checkpoint.fits(graph_of(SHAPES))
    for other in ({**SHAPES, "scale": (2,)}, {**SHAPES, "more": (2,)}, {"scale": ()}):
        with pytest.raises(CheckpointError, match="another model"):
            checkpoint.fits(graph_of(other))
