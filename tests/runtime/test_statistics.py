"""Batch norm split over replicas against one process on the whole micro-batch; recomputation; what is refused."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isthmus.cost.runnable import check_mixing
from isthmus.errors import ModelError, PlanError
from isthmus.model.graph import Block, BlockGraph, Parameter
from isthmus.model.job import Job
from isthmus.model.runnable_blocks import Pieces, cut
from isthmus.model.torch_export import Example
from isthmus.plan.resolve import ResolvedPipeline, ResolvedReplica, ResolvedStage
from isthmus.plan.types import Pipeline
from isthmus.runtime.batch_statistics import SynchronisedNorm, synchronised, unchanged
from tests.quiet import PATIENCE

from ..model import models

Work = Callable[[Callable[[Tensor], Tensor], int], Any]


def side_by_side(count: int, work: Work) -> list[Any]:
    """Runs `work(reduce, replica)` in a thread for each replica; `reduce` sums in replica order, for all the same."""
    barrier = threading.Barrier(count, timeout=PATIENCE)
    slots: list[Any] = [None] * count
    results: list[Any] = [None] * count
    failures: list[BaseException] = []

    def reducer(me: int) -> Callable[[Tensor], Tensor]:
        def reduce(tensor: Tensor) -> Tensor:
            slots[me] = tensor.clone()
            barrier.wait()
            total: Tensor = sum(slots[1:], slots[0])
            barrier.wait()
            return total

        return reduce

    def run(me: int) -> None:
        try:
            results[me] = work(reducer(me), me)
        except BaseException as failure:
            failures.append(failure)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(me,)) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def intervals(shares: Sequence[int]) -> list[slice]:
    ends = [sum(shares[: i + 1]) for i in range(len(shares))]
    return [slice(end - share, end) for share, end in zip(shares, ends, strict=True)]


def trained(pieces: Pieces, x: Tensor, g: Tensor, rounds: int, *, recompute: bool = False) -> tuple[Tensor, Tensor]:
    """Output and input gradient of the last of some micro-batches through all blocks; all leave their mark."""
    for number in range(rounds):
        source = (x + number).detach().requires_grad_()
        known: dict[str, Any] = dict(zip(pieces.inputs, [source], strict=True))
        for module, taken, made in zip(pieces.blocks, pieces.incoming, pieces.outgoing, strict=True):
            inputs = [known[name] for name in taken]
            if recompute:
                frozen = lambda m=module: (torch.enable_grad(), unchanged(m))  # noqa: E731
                outputs = checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=frozen)
            else:
                outputs = module(*inputs)
            known |= zip(made, outputs, strict=True)
        y = pieces.result(known)
        y.backward(g)
    return y.detach(), source.grad  # type: ignore[return-value]


def pieces_of(model: nn.Module, x: Tensor) -> Pieces:
    return cut(model.double().train(), Example(args=(x[:2],)), name="m")


def compared(
    model: nn.Module, pieces: Pieces, x: Tensor, shares: Sequence[int], *, rounds: int = 2, recompute: bool = False
) -> None:
    """Replicas with these shares against the plain model: outputs, gradients, state. The model is used up."""
    parts = [dataclasses.replace(pieces, blocks=copy.deepcopy(pieces.blocks)) for _ in shares]
    y, gx = plainly(model, x, rounds)
    g = probe(y)
    cuts = intervals(shares)

    def work(reduce: Callable[[Tensor], Tensor], me: int) -> tuple[Tensor, Tensor]:
        for block in parts[me].blocks:
            synchronised(block, reduce)
        return trained(parts[me], x[cuts[me]], g[cuts[me]], rounds, recompute=recompute)

    results = side_by_side(len(shares), work)
    close(torch.cat([result[0] for result in results]), y)
    close(torch.cat([result[1] for result in results]), gx)
    for name, parameter in model.named_parameters():
        found = [held(part, nn.Module.named_parameters)[name].grad for part in parts]
        close(sum(found[1:], found[0]), parameter.grad)  # type: ignore[arg-type]
    for name, buffer in model.named_buffers():
        found = [held(part, nn.Module.named_buffers)[name] for part in parts]
        assert all(torch.equal(found[0], other) for other in found)
        close(found[0], buffer)  # type: ignore[arg-type]


def held(pieces: Pieces, named: Callable[[nn.Module], Any]) -> dict[str, Any]:
    return {name: tensor for block in pieces.blocks for name, tensor in named(block)}


def plainly(model: nn.Module, x: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    for number in range(rounds):
        source = (x + number).detach().requires_grad_()
        y = model(source)
        y.backward(probe(y))
    return y.detach(), source.grad  # type: ignore[return-value]


def probe(y: Tensor) -> Tensor:
    """A gradient that differs in every place, and is not balanced."""
    return torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y).sin()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 5


@pytest.fixture(scope="module")
def resnet() -> Callable[[], tuple[nn.Module, Pieces]]:
    """A new residual network, and itself in pieces, each time."""
    torch.manual_seed(0)
    model = models.Resnet()
    pieces = pieces_of(model, drawn(2, 3, 8, 8))

    def make() -> tuple[nn.Module, Pieces]:
        copied, blocks = copy.deepcopy((model, pieces.blocks))
        return copied, dataclasses.replace(pieces, blocks=blocks)

    return make


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("shares", [(3, 1), (1, 2, 4)], ids=str)
def test_a_split_residual_network_equals_one_process(resnet: Any, shares: tuple[int, ...], recompute: bool) -> None:
    compared(*resnet(), drawn(sum(shares), 3, 8, 8), shares, recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_child_modules_too(recompute: bool) -> None:
    torch.manual_seed(0)
    bare = nn.BatchNorm1d(3, affine=False, momentum=None, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 8), models.PerSample(), nn.BatchNorm1d(8), nn.Linear(8, 3), bare)
    pieces = pieces_of(model, drawn(2, 4))
    assert pieces.graph.how == "modules"
    compared(model, pieces, drawn(5, 4), (2, 3), rounds=3, recompute=recompute)


@settings(max_examples=15)
@given(
    shares=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    inner=st.lists(st.integers(1, 3), max_size=2),
    affine=st.booleans(),
    tracked=st.booleans(),
    offset=st.sampled_from([0.0, 1.0, -1e3]),
)
def test_the_norm_itself(shares: list[int], inner: list[int], affine: bool, tracked: bool, offset: float) -> None:
    """Any share, also of one value; channels without weights; values far from zero."""
    if sum(shares) == 1:
        shares = [2]
    x = drawn(sum(shares), 3, *inner) + offset
    weight, bias = (torch.rand(3, dtype=torch.float64).requires_grad_() if affine else None for _ in range(2))
    state = [torch.full((3,), start, dtype=torch.float64) if tracked else None for start in (0.5, 2.0)]
    alone = [None if s is None else s.clone() for s in state]
    whole = x.clone().requires_grad_()
    y = F.batch_norm(whole, *alone, weight, bias, training=True, momentum=0.3, eps=1e-5)  # type: ignore[arg-type]
    leaves = [leaf for leaf in (whole, weight, bias) if leaf is not None]
    wanted = torch.autograd.grad(y, leaves, probe(y))

    def work(reduce: Callable[[Tensor], Tensor], me: int) -> tuple[Any, ...]:
        part, own = x[intervals(shares)[me]].clone().requires_grad_(), [None if s is None else s.clone() for s in state]
        out = SynchronisedNorm(reduce)(part, weight, bias, *own, 0.3, 1e-5)
        given = [leaf for leaf in (part, weight, bias) if leaf is not None]
        return out.detach(), own, torch.autograd.grad(out, given, probe(y)[intervals(shares)[me]])

    results = side_by_side(len(shares), work)
    close(torch.cat([r[0] for r in results]), y.detach())
    close(torch.cat([r[2][0] for r in results]), wanted[0])
    for index, gradient in enumerate(wanted[1:], start=1):
        close(torch.stack([r[2][index] for r in results]).sum(0), gradient)
    for own, other in ((r[1], alone) for r in results):
        for a, b in zip(own, other, strict=True):
            assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-10, atol=1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_far_from_zero_cancels_nothing(dtype: torch.dtype) -> None:
    x = (drawn(64, 2) / 3 + 3000).to(dtype)
    wanted = F.batch_norm(x.double(), None, None, training=True)
    found = side_by_side(2, lambda reduce, me: SynchronisedNorm(reduce)(
        x[32 * me : 32 * me + 32], None, None, None, None, 0.1, 1e-5))  # fmt: skip
    torch.testing.assert_close(torch.cat(found).double(), wanted, rtol=1e-2, atol=1e-2)
    assert found[0].dtype == dtype


def test_one_reduce_forward_one_backward_and_none_without_gradient() -> None:
    calls = []
    norm = SynchronisedNorm(lambda tensor: calls.append(tensor.numel()) or tensor)  # type: ignore[func-returns-value]
    weight = torch.ones(3, requires_grad=True)
    x = torch.randn(4, 3, requires_grad=True)
    norm(x, weight, None, None, None, 0.1, 1e-5).sum().backward()
    assert calls == [7, 6]
    norm(x.detach(), weight, None, None, None, 0.1, 1e-5).sum().backward()
    assert calls == [7, 6, 7]


def test_an_unsplit_norm_is_recomputed_without_counting_twice(resnet: Any) -> None:
    """The plain operation too: its state is put back, and autograd does not mind."""
    (model, _), (again, pieces) = resnet(), resnet()
    x = drawn(4, 3, 8, 8)
    y, gx = plainly(model, x, 3)
    found, found_gx = trained(pieces, x, probe(y), 3, recompute=True)
    close(found, y)
    close(found_gx, gx)
    for name, buffer in model.named_buffers():
        close(dict(again.named_buffers())[name], buffer)
    assert int(again.stem[1].num_batches_tracked) == 3


def test_only_what_changes_is_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("table", torch.arange(4.0))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)  # type: ignore[operator]
            return self.linear(x) * self.table

    model = Counting()
    (block,) = cut(model, Example(args=(torch.zeros(2, 4),)), name="m").blocks
    with unchanged(block):
        block(torch.zeros(2, 4))
        assert model.seen == 1
    assert model.seen == 0
    block(torch.zeros(2, 4))
    assert model.seen == 1 and torch.equal(model.table, torch.arange(4.0))  # type: ignore[arg-type]


def test_the_native_form_and_what_is_used_of_it() -> None:
    class Native(nn.Module):
        def __init__(self, asks: bool) -> None:
            super().__init__()
            self.linear, self.asks = nn.Linear(3, 3), asks

        def forward(self, x: Tensor) -> Tensor:
            y, mean, _ = torch.native_batch_norm(self.linear(x), None, None, None, None, True, 0.1, 1e-5)
            return y + mean if self.asks else y

    model = Native(False)
    compared(model, pieces_of(model, drawn(4, 3)), drawn(4, 3), (1, 3))
    block = pieces_of(Native(True), drawn(4, 3)).blocks[0]
    with pytest.raises(ModelError, match="statistics of its own batch norm"):
        synchronised(block, lambda tensor: tensor)


def mixing_plan(mixes: str, shares: Sequence[int], *, slices: int = 1, duplicate: bool = False) -> ResolvedPipeline:
    def block(name: str, mixed: tuple[str, ...]) -> Block:
        return Block(
            name=name, digest="", parameters=("w",), forward_flops=1.0, backward_flops=1.0, saved=1.0, moved=1.0,
            weights_moved=1.0, operations=1, mixes_samples=mixed,
        )  # fmt: skip

    graph = BlockGraph(
        name="m",
        blocks=(block("calm", ()), block("stirred", (mixes,))),
        tensors=(),
        parameters=(Parameter(name="w", elements=1, shape=(1,)),),
    )
    replicas = tuple(
        ResolvedReplica(number=i, devices=(i,), lo=0 if duplicate else part.start, hi=part.stop, slices=slices)
        for i, part in enumerate(intervals(shares))
    )
    job = Job(name="j", model="m.json", batch=8)
    pipeline = Pipeline(job=job, model_digest="", precision="fp32", micro_batches=1, stages=())
    stage = ResolvedStage(first=0, last=1, replicas=replicas, duplicate=duplicate)
    return ResolvedPipeline(
        pipeline=pipeline, graph=graph, micro_batch=8, stages=(stage,), stage_of=(0, 0), syncs=(), sync_of={},
        holders={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mixes", "shares", "slices", "duplicate", "text"),
    [
        ("softmax", (8,), 1, False, None),
        ("softmax", (8, 8), 1, True, None),
        ("softmax", (5, 3), 1, False, "block stirred may mix samples, and the plan splits the batch into replicas. "
         "Found softmax. Expected operations that are proven to keep samples apart, or the whole batch on one"),
        ("softmax", (8,), 2, False, "into slices"),
        ("batch_norm", (5, 3), 1, False, None),
        ("batch_norm", (5, 3), 2, False, "splits its micro-batch into slices. Found batch_norm. Expected one"),
        ("batch_norm", (8, 8), 2, True, "into slices"),
    ],
)  # fmt: skip
def test_what_a_plan_may_split(
    mixes: str, shares: tuple[int, ...], slices: int, duplicate: bool, text: str | None
) -> None:
    part = mixing_plan(mixes, shares, slices=slices, duplicate=duplicate)
    if text is None:
        check_mixing(part)
        return
    with pytest.raises(PlanError) as caught:
        check_mixing(part)
    assert caught.value.rule == "mixes-samples" and text in str(caught.value)
    assert "pipeline j, stage calm .. stirred" in str(caught.value)
