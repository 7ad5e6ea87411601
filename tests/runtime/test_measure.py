"""Measured blocks: which points there are, what runs meanwhile, and what the times can be held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isthmus.cluster.catalog import CATALOG
from isthmus.cluster.load import parse_cluster
from isthmus.errors import ModelError, UsageError
from isthmus.model.job import Job
from isthmus.model.profile import BlockTime
from isthmus.model.runnable_blocks import Pieces, cut
from isthmus.model.source import build, load_graph
from isthmus.model.torch_export import Example
from isthmus.planners.problem import pick_precision
from isthmus.runtime.profiling.block_times import LeftOut, measure, profile_model
from isthmus.runtime.profiling.machine import find_machine, free_memory, guess_kind
from isthmus.runtime.random.draws import draws_of
from isthmus.runtime.random.randomness import Randomness
from tests.quiet import needs_quiet

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-PCIE-32GB", "V100-32GB"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA RTX A5000", "RTX-A5000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Quadro RTX 8000", "RTX-8000"),
        ("NVIDIA GeForce GTX 1080", "GTX-1080"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX-1080Ti"),
        ("NVIDIA TITAN Xp", "TITAN-Xp"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080Ti"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 NVL", None),
        ("", None),
    ],
)
def test_kinds_are_known_by_what_vendors_call_them(name: str, kind: str | None) -> None:
    assert guess_kind(name) == kind


def test_every_kind_of_the_catalog_is_known_by_its_own_name() -> None:
    assert {kind: guess_kind(kind) for kind in CATALOG} == {kind: kind for kind in CATALOG}


def test_the_precision_is_the_one_that_a_plan_would_have() -> None:
    job = Job(name="j", model="m.json", batch=1)
    for kind in CATALOG:
        text = f"{{kind: cluster, version: 1, name: one, hosts: {{a: {{region: r, devices: {{{kind}: 1}}}}}}}}"
        assert find_machine(kind).precision == pick_precision(parse_cluster(text), job), kind
        assert find_machine(kind, "fp16").precision == "fp16"


def test_the_device_may_be_called_anything_that_a_cluster_file_may() -> None:
    cpu = find_machine("CPU", threads=3)
    assert (cpu.device, cpu.kind, cpu.precision, cpu.threads) == (CPU, "CPU", "fp32", 3)
    assert find_machine("lab-card").kind == "lab-card" and find_machine("CPU").threads >= 1
    with pytest.raises(UsageError, match="letters, digits"):
        find_machine("no such name")


# -- what is measured


@pytest.mark.slow("profiles whole models; `test_profile_command` profiles a small one in the fast set")
@pytest.mark.parametrize("model", ["zoo:gpt-tiny", "zoo:cnn-tiny"])
def test_points_are_of_the_blocks_that_planners_know(model: str) -> None:
    sequence = 32 if model == "zoo:gpt-tiny" else None
    before, told = torch.get_num_threads(), []
    found = profile_model(
        model,
        find_machine("CPU", "bf16", threads=1),
        sequence=sequence,
        samples=(3, 1),
        listen=lambda block, samples: told.append((block, samples)),
    )
    digests = dict.fromkeys(block.digest for block in load_graph(model, sequence=sequence).blocks)
    assert [(point.block, point.samples) for point in found.profile.blocks] == [(d, s) for d in digests for s in (1, 3)]
    assert {(p.device, p.precision, p.tensor) for p in found.profile.blocks} == {("CPU", "bf16", 1)}
    assert all(point.forward_seconds > 0 and point.backward_seconds > 0 for point in found.profile.blocks)
    assert found.left_out == () and torch.get_num_threads() == before
    assert {(point.name, point.samples) for point in found.profile.blocks} <= set(told)


class Watched(nn.Module):
    """A block that lets a test look at what goes in."""

    def __init__(self, block: nn.Module, look: Callable[..., None]) -> None:
        super().__init__()
        self.block, self.look = block, look

    def forward(self, *inputs: Any) -> Any:
        self.look(*inputs)
        return self.block(*inputs)


class Net(nn.Module):
    """Three equal layers with dropout between two others: all are their own block, since nothing pairs them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(3)
        )
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.last(x)
        return out


def cut_net(module: nn.Module, *shape: int) -> tuple[Pieces, Any, dict[int, Example]]:
    """A module in pieces, what is random in them, and inputs of 1 and 4 samples."""
    example = Example(args=(torch.randn(2, *shape),), kwargs={})
    pieces = cut(module, example, name="net")
    inputs = {count: Example(args=(torch.randn(count, *shape),), kwargs={}) for count in (1, 4)}
    return pieces, draws_of(pieces, example), inputs


def watched(pieces: Pieces, look: Callable[..., None]) -> Pieces:
    """`look` is told the block, then its inputs."""
    blocks = (
        Watched(block, lambda *inputs, index=index: look(index, *inputs)) for index, block in enumerate(pieces.blocks)
    )
    return replace(pieces, blocks=tuple(blocks))


def test_blocks_get_what_they_get_in_a_worker() -> None:
    """Real inputs, hashed dropout, gradients where gradients flow; and weights are as they were, without gradients."""
    pieces, draws, inputs = cut_net(Net(), 8)
    assert any(draws) and len(pieces.blocks) > 3
    randomness, expected = Randomness(0, pieces.graph, draws), {}
    for count, example in inputs.items():
        known = pieces.bind(example.args, example.kwargs)
        for index, block in enumerate(pieces.blocks):
            expected[index, count] = [known[name] for name in pieces.incoming[index]]
            with torch.no_grad(), randomness.at(0, index, range(count)):
                known |= zip(pieces.outgoing[index], block(*expected[index, count]), strict=True)
    passes: dict[tuple[int, int], int] = {}

    def look(index: int, *taken: Tensor) -> None:
        count = len(taken[0])
        assert all(torch.equal(*pair) for pair in zip(taken, expected[index, count], strict=True))
        flows = torch.is_grad_enabled()
        assert all(tensor.requires_grad == (flows and index > 0) for tensor in taken)
        passes[index, count] = passes.get((index, count), 0) + flows

    state = {name: tensor.clone() for name, tensor in pieces.blocks[1].state_dict().items()}
    timed, left_out = measure(watched(pieces, look), draws, inputs, CPU)
    measured = {(one.block, one.samples) for one in timed}
    assert not left_out and measured == {key for key, times in passes.items() if times}
    digests = [block.digest for block in pieces.graph.blocks]
    assert {block for block, _ in measured} == {digests.index(digest) for digest in digests}
    assert len({*digests}) < len(digests), "equal ones are measured once"
    assert all(4 <= times <= 21 for times in passes.values() if times), passes
    assert all(torch.equal(tensor, state[name]) for name, tensor in pieces.blocks[1].state_dict().items())
    assert all(parameter.grad is None for block in pieces.blocks for parameter in block.parameters())


# -- what has no room


def test_what_has_no_room_is_left_out() -> None:
    pieces, draws, inputs = cut_net(Net(), 8)
    names = [block.name for block in pieces.graph.blocks]
    digests = [block.digest for block in pieces.graph.blocks]
    firsts = [index for index, digest in enumerate(digests) if digests.index(digest) == index]
    assert firsts[:2] == [0, 1] and firsts[-1] > 1

    def full(where: int, always: bool) -> Callable[..., None]:
        def look(index: int, *taken: Tensor) -> None:
            if index == where and len(taken[0]) == 4 and (always or torch.is_grad_enabled()):
                raise torch.OutOfMemoryError("CUDA out of memory")

        return look

    everything = {(index, count) for index in firsts for count in inputs}
    timed, left_out = measure(watched(pieces, full(1, False)), draws, inputs, CPU)
    assert left_out == [LeftOut(names[1], 4)]
    assert {(one.block, one.samples) for one in timed} == everything - {(1, 4)}
    timed, left_out = measure(watched(pieces, full(1, True)), draws, inputs, CPU)
    assert left_out == [LeftOut(names[index], 4) for index in firsts[1:]], "nothing comes out of it"
    assert {(one.block, one.samples) for one in timed} == everything - {(index, 4) for index in firsts[1:]}
    timed, left_out = measure(pieces, draws, inputs, CPU, room=lambda: 0.0)
    assert not timed and {*left_out} == {LeftOut(names[index], count) for index, count in everything}
    assert free_memory() > 1e6


def test_a_block_that_fails_is_named() -> None:
    pieces, draws, inputs = cut_net(Net(), 8)

    def look(index: int, *taken: Tensor) -> None:
        if index == 1:
            raise ValueError("expected more than 1 value per channel")

    with pytest.raises(ModelError, match="ValueError on 1 samples: expected more than 1 value") as caught:
        measure(watched(pieces, look), draws, inputs, CPU)
    assert caught.value.where == f"block {pieces.graph.blocks[1].name}"


# -- what times can be held against; a busy machine gets three chances


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@needs_quiet()
def test_more_work_takes_longer() -> None:
    def seconds(width: int) -> float:
        pieces, draws, inputs = cut_net(nn.Sequential(nn.Linear(256, width), nn.ReLU()), 64, 256)
        timed, _ = measure(pieces, draws, {4: inputs[4]}, CPU)
        return sum(one.forward + one.backward for one in timed)

    assert any(seconds(2048) > 2 * seconds(256) for _ in range(3))


@pytest.mark.slow("profiles a whole model up to three times")
@pytest.mark.usefixtures("one_thread")
@needs_quiet()
def test_the_blocks_add_up_to_the_model() -> None:
    built = build("zoo:gpt-tiny", 32)
    example = built.example(2)

    def whole() -> float:
        begin = perf_counter()
        output = built.module(*example.args, **example.kwargs)
        torch.autograd.backward(output, torch.ones_like(output))
        return perf_counter() - begin

    def ratio() -> float:
        found = profile_model("zoo:gpt-tiny", find_machine("CPU", threads=1), sequence=32, samples=(2,))
        point: dict[str, BlockTime] = {one.block: one for one in found.profile.blocks}
        points = [point[block.digest] for block in found.graph.blocks]
        times = sorted(whole() for _ in range(7))
        return sum(one.forward_seconds + one.backward_seconds for one in points) / times[3]

    ratios: list[float] = []
    while len(ratios) < 3 and not (ratios and 0.5 < ratios[-1] < 2.0):
        ratios.append(ratio())
    assert 0.5 < ratios[-1] < 2.0, ratios
