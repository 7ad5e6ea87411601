"""A loop of one's own: the same losses and weights as a plain loop, for modules of both kinds."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus.deploy import join
from isthmus.errors import CheckpointError, PlanError, RunError, UsageError
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Optimizer
from isthmus.plan.file import PlanFile
from isthmus.plan.types import Pipeline, Plan, Replica, Stage, Sync
from tests.deploy.jobs import DATA, MODEL, A, B, one_group, two_devices, two_replicas, two_stages
from tests.quiet import PATIENCE

BATCH, STEPS = 6, 4


class Straight(nn.Sequential):
    """torch.export follows it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class Stubborn(nn.Sequential):
    """torch.export does not follow a layer that loops over samples; child modules are cut instead."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), _OneByOne(), nn.Linear(16, 16), _OneByOne(), nn.Linear(16, 4))


class _OneByOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.relu() for row in x])


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (output - target).square().sum(), torch.tensor(output.numel())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, 4, generator=generator)) for _ in range(STEPS)
    ]


def plan_for(graph: BlockGraph, *, replicated: bool = False) -> PlanFile:
    """Two stages, the first on one device, the second on the other; or one stage on both."""
    names = [block.name for block in graph.blocks]
    assert len(names) > 1
    syncs = (Sync(bucket="all", how="ring", parameters=tuple(f"[{name}]" for name in names), participants=(A, B)),)
    replicas = (Replica(devices=(A,), share=1), Replica(devices=(B,), share=2))
    stages = (
        (Stage(first=names[0], last=names[-1], replicas=replicas),)
        if replicated
        else (
            Stage(first=names[0], last=names[0], replicas=(Replica(devices=(A,), share=BATCH // 2, slices=1),)),
            Stage(first=names[1], last=names[-1], replicas=(Replica(devices=(B,), share=BATCH // 2, slices=2),)),
        )
    )
    job = Job(name="own", model="own.json", batch=BATCH, optimizer=Optimizer(learning_rate=1e-2))
    part = Pipeline(
        job=job, model_digest=graph.digest, precision="fp32", micro_batches=2, stages=stages,
        syncs=syncs if replicated else (),
    )  # fmt: skip
    return PlanFile(plan=Plan(cluster="desk", parts=(part,)), cluster=two_devices())


def plain(model: nn.Module, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, target in batches()[:steps]:
        loss = (model(inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind()


@pytest.mark.parametrize(("kind", "how"), [(Straight, "export"), (Stubborn, "modules")])
def test_a_loop_of_ones_own(kind: type[nn.Module], how: str, tmp_path: Path) -> None:
    model = made(kind)
    graph = isthmus.capture(model, torch.zeros(2, 8), name="own")
    assert graph.how == how
    wanted, weights = plain(made(kind), STEPS)
    untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with isthmus.join(plan_for(graph), model, squares) as run:
        found = [run.step(batch) for batch in batches()[:2]]
        run.save(tmp_path)
        found += [run.step(batch) for batch in batches()[2:]]
        state = run.state_dict()
    assert found == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(state, weights)
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in model.state_dict().items())
    model.load_state_dict(state)
    with isthmus.join(plan_for(graph), made(kind), squares, resume=tmp_path) as run:
        assert [run.step(batch) for batch in batches()[2:]] == pytest.approx(wanted[2:], rel=1e-5)


def test_a_model_by_its_name() -> None:
    """The job's own model and loss, under two plans: the same losses."""
    tokens = torch.arange(4 * 9).view(4, 9) % 64
    batch = tokens[:, :-1], tokens[:, 1:].contiguous()
    losses = []
    for file in (two_stages(), two_replicas()):
        with isthmus.join(file, trusted=(MODEL, DATA)) as run:
            losses.append([run.step(batch) for _ in range(3)])
            assert {"lm_head.weight", "transformer.wte.weight"} <= run.state_dict().keys()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][2] < losses[0][0]


def test_what_fails_is_named() -> None:
    graph = isthmus.capture(made(Straight), torch.zeros(2, 8), name="own")

    def loss(output: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        if target.sum() > 1e6:
            raise ValueError("too much")
        return squares(output, target)

    run = isthmus.join(plan_for(graph), made(Straight), loss)
    (inputs, target), *_ = batches()
    with pytest.raises(UsageError, match="no plan changes how many samples"):
        run.step((inputs[:3], target[:3]))
    with pytest.raises(UsageError, match="nothing was trained yet"):
        run.state_dict()
    run.step((inputs, target))
    with pytest.raises(RunError, match="ValueError: too much") as caught:
        run.step((inputs, target + 1e7))
    assert caught.value.where == f"worker {B}, stage 1, step 2"
    with pytest.raises(UsageError, match="needs its loss"):
        isthmus.join(plan_for(graph), made(Straight))


def test_targets_of_any_form() -> None:
    """Each replica gets its own rows of every tensor; what has no rows is refused, and the run goes on."""
    graph = isthmus.capture(made(Straight), torch.zeros(2, 8), name="own")
    weights = torch.arange(1.0, BATCH + 1)

    def weighted(output: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        (wanted,), weight = target["wanted"], target["weight"]
        return ((output - wanted).square().sum(1) * weight).sum(), weight.sum()

    inputs, wanted = batches()[0]
    model = made(Straight)
    expected = (((model(inputs) - wanted).square().sum(1) * weights).sum() / weights.sum()).item()
    for whole in (plan_for(graph), plan_for(graph, replicated=True)):
        with isthmus.join(whole, made(Straight), weighted) as run:
            for bad, found in ((2.5, "a float"), (torch.tensor(1.0), r"float32\[\]"), (weights[:3], "3, 6 samples")):
                with pytest.raises(UsageError, match=f"the targets .* Found .*{found}"):
                    run.step((inputs, {"wanted": [wanted], "weight": bad}))
            found = run.step((inputs, {"wanted": [wanted], "weight": weights}))
        assert found == pytest.approx(expected, rel=1e-5)


def fails() -> None:
    raise ValueError("enough")


def interrupts() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(0.2)


@pytest.mark.parametrize(("act", "error"), [(fails, RunError), (interrupts, KeyboardInterrupt)])
def test_a_step_that_does_not_end_closes_the_run(act: Callable[[], None], error: type[BaseException]) -> None:
    graph = isthmus.capture(made(Straight), torch.zeros(2, 8), name="own")
    calls: list[Callable[[], None]] = []

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        with suppress(IndexError):  # both replicas come here
            calls.pop()()
        return squares(output, target)

    before = set(threading.enumerate())
    run = isthmus.join(plan_for(graph, replicated=True), made(Straight), loss)
    run.step(batches()[0])
    calls.append(act)
    with pytest.raises(error):
        run.step(batches()[1])
    for call in (lambda: run.step(batches()[1]), run.state_dict):
        with pytest.raises(UsageError, match=f"closed when it failed .{error.__name__}"):
            call()
    deadline = time.monotonic() + PATIENCE
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    graph = isthmus.capture(made(Straight), torch.zeros(2, 8), name="own")
    wanted, _ = plain(made(Straight), STEPS)
    with isthmus.join(plan_for(graph), made(Straight), squares) as run:
        for batch in batches()[:2]:
            run.step(batch)
            saved = run.save(tmp_path)
    part = next(saved.glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with (
        pytest.warns(UserWarning, match="skipping a damaged checkpoint.*changed after it was saved"),
        isthmus.join(plan_for(graph), made(Straight), squares, resume=tmp_path) as run,
    ):
        assert run.step(batches()[1]) == pytest.approx(wanted[1], rel=1e-5) and run.step_number == 2
    with pytest.raises(CheckpointError, match="changed after it was saved"):
        isthmus.join(plan_for(graph), made(Straight), squares, resume=saved)


def test_a_folder_is_its_own_until_it_is_closed(tmp_path: Path) -> None:
    graph = isthmus.capture(made(Straight), torch.zeros(2, 8), name="own")
    with (
        isthmus.join(plan_for(graph), made(Straight), squares) as first,
        isthmus.join(plan_for(graph), made(Straight), squares) as second,
    ):
        for run in (first, second):
            run.step(batches()[0])
        first.save(tmp_path)
        first.save(tmp_path)
        with pytest.raises(CheckpointError, match="another run is using this folder"):
            second.save(tmp_path)
        first.close()
        second.save(tmp_path)


def test_a_checkpoint_that_does_not_fit_is_not_trained_over(tmp_path: Path) -> None:
    graph = isthmus.capture(made(Straight), torch.zeros(2, 8), name="own")
    with isthmus.join(plan_for(graph), made(Straight), squares) as run:
        run.step(batches()[0])
        run.save(tmp_path)
    tokens = torch.zeros(4, 8, dtype=torch.long)
    with isthmus.join(two_stages(), trusted=(MODEL, DATA), resume=tmp_path) as other:
        with pytest.raises(CheckpointError):
            other.step((tokens, tokens))
        with pytest.raises(UsageError, match="was closed"):
            other.step((tokens, tokens))


def test_who_meets_in_the_backward_shares_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one backward thread for each device: members of a group would wait for each other for ever."""
    tokens = torch.zeros(4, 8, dtype=torch.long)
    normed = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    norm = plan_for(isthmus.capture(normed, torch.zeros(2, 8), name="own"), replicated=True)
    monkeypatch.setattr(join, "_device", lambda index: torch.device("cuda:0"))
    for run, batch in (
        (isthmus.join(one_group(), trusted=(MODEL, DATA)), (tokens, tokens)),
        (isthmus.join(norm, normed, squares), batches()[0]),
    ):
        with pytest.raises(PlanError, match=r"cannot share a CUDA device .* `isthmus train`") as caught:
            run.step(batch)
        assert caught.value.rule == "run" and caught.value.found == f"{A} and {B} on cuda:0"
