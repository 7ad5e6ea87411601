"""Schedules, parameter groups, averages and torch's own options: the same as plain torch, whatever the plan."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from isthmus.errors import JobError, UsageError
from isthmus.model.job import Job, Optimizer, ParameterGroup, RateSchedule
from isthmus.model.parameter_groups import check_groups, freeze
from isthmus.plan.types import Plan
from isthmus.runtime.checkpoint.reading import latest, open_checkpoint
from isthmus.runtime.learning_rate import rate_factor
from tests.runtime.tasks import TASKS, pieces_of
from tests.runtime.test_plans import CLUSTER
from tests.runtime.test_resume import gpt
from tests.runtime.world import Result, assert_same, train

GROUPS = (
    ParameterGroup(parameters=("*.bias", "*ln*"), weight_decay=0.0),
    ParameterGroup(parameters=("transformer.wte.*",), learning_rate=2e-3),
)
ADAMW = Optimizer(
    name="adamw", learning_rate=1e-2, weight_decay=0.1, clip=0.5, groups=GROUPS, average=0.9, eps=1e-7,
    schedule=RateSchedule(shape="cosine", warmup=2, end=0.1, steps=6),
)  # fmt: skip
SGD = Optimizer(
    name="sgd", learning_rate=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, groups=GROUPS[:1], average=0.5,
    schedule=RateSchedule(shape="linear", warmup=1, steps=6),
)  # fmt: skip
AMSGRAD = Optimizer(  # the keys' biases have no gradient but rounding, which a small eps would make large
    name="adam", learning_rate=1e-2, amsgrad=True, weight_decay=0.01, average=0.8, eps=1e-4
)
KINDS = ("alone", "grouped", "sharded", "stages")


def plain_torch(plan: Plan, steps: int) -> tuple[Result, dict[str, torch.Tensor]]:
    """One process with torch's param groups, LambdaLR and AveragedModel; returns the averages, too."""
    job, task = plan.jobs[0], TASKS["gpt"]
    settings, model = job.optimizer, task.make()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.average or 0.9))
    groups: list[dict[str, object]] = [{"params": []}, *({"params": []} for _ in settings.groups)]
    for name, parameter in model.named_parameters():
        matches = [any(fnmatchcase(name, p) for p in group.parameters) for group in settings.groups]
        groups[matches.index(True) + 1 if any(matches) else 0]["params"].append(parameter)  # type: ignore[attr-defined]
    for given, own in zip(groups[1:], settings.groups, strict=True):
        given |= {"lr": own.learning_rate} if own.learning_rate is not None else {}
        given |= {"weight_decay": own.weight_decay} if own.weight_decay is not None else {}
    used = [group for group in groups if group["params"]]
    if settings.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            used, lr=settings.learning_rate, momentum=settings.momentum, weight_decay=settings.decay, nesterov=True
        )
    else:
        kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
        optimizer = kind(
            used, lr=settings.learning_rate, eps=settings.eps, weight_decay=settings.decay, amsgrad=settings.amsgrad
        )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: closed_form(settings.schedule, step, 1000))
    losses = []
    for step in range(steps):
        example, target = task.get(range(step * job.batch, (step + 1) * job.batch))
        loss, count = task.loss(model(*example.args, **example.kwargs), target)
        (loss / count).backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        losses.append(float(loss.detach()) / float(count))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return Result(losses, weights), {name: p.detach() for name, p in averaged.module.named_parameters()}


def closed_form(schedule: RateSchedule, step: int, steps: int) -> float:
    """The factor as transformers' own schedules have it."""
    import transformers

    parameter = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    total, warmup = schedule.steps or steps, schedule.warmup
    made = {
        "constant": lambda: transformers.get_constant_schedule_with_warmup(parameter, warmup),
        "linear": lambda: transformers.get_linear_schedule_with_warmup(parameter, warmup, total),
        "cosine": lambda: transformers.get_cosine_with_min_lr_schedule_with_warmup(
            parameter, warmup, total, min_lr_rate=schedule.end
        ),
        "warmup-stable-decay": lambda: transformers.get_wsd_schedule(
            parameter, num_warmup_steps=warmup, num_decay_steps=schedule.decay or 1, num_training_steps=total,
            min_lr_ratio=schedule.end, decay_type="linear",
        ),
    }[schedule.shape]()  # fmt: skip
    return float(made.lr_lambdas[0](step))


@pytest.mark.parametrize(
    "schedule",
    [
        RateSchedule(),
        RateSchedule(shape="constant", warmup=7),
        RateSchedule(shape="linear", warmup=5, steps=40),
        RateSchedule(shape="linear"),
        RateSchedule(shape="cosine", warmup=10, steps=50),
        RateSchedule(shape="cosine", warmup=3, end=0.1),
        RateSchedule(shape="warmup-stable-decay", warmup=5, decay=15, end=0.2, steps=60),
    ],
)
def test_schedules_are_those_of_transformers(schedule: RateSchedule) -> None:
    job = Job(name="j", model="m", batch=1, steps=60, optimizer=Optimizer(schedule=schedule))
    factor, total = rate_factor(job), schedule.steps or 60
    for step in range(total):
        if step < schedule.warmup:  # its own schedule with a stable part begins at the end's rate instead
            assert factor(step) == step / schedule.warmup
        else:
            assert factor(step) == pytest.approx(closed_form(schedule, step, 60), abs=1e-12)
    assert factor(total + 5) == (1.0 if schedule.shape == "constant" else pytest.approx(schedule.end, abs=1e-12))


def halved(step: int) -> float:
    return 0.5**step


def no_number(step: int) -> str:
    return "fast"


def upwards(step: int) -> float:
    return -1.0


def endless(step: int) -> int:
    return 10**400


def failing(step: int) -> float:
    return step / 0


def test_a_schedule_of_ones_own() -> None:
    def job(name: str) -> Job:
        shape = f"tests.runtime.test_optimizers:{name}"
        return Job(name="j", model="m", batch=1, optimizer=Optimizer(schedule=RateSchedule(shape=shape)))

    assert [rate_factor(job("halved"))(step) for step in range(3)] == [1.0, 0.5, 0.25]
    for name in ("no_number", "upwards", "endless"):
        with pytest.raises(UsageError, match="gives no factor"):
            rate_factor(job(name))(3)
    with pytest.raises(UsageError, match=r"the schedule failed.*ZeroDivisionError"):
        rate_factor(job("failing"))(3)


@pytest.mark.parametrize("optimizer", [ADAMW, SGD, AMSGRAD], ids=["adamw", "sgd", "amsgrad"])
@pytest.mark.parametrize(
    "kind", ["alone", pytest.param("grouped", marks=pytest.mark.slow("traces groups")), "sharded", "stages"]
)
def test_settings_of_optimizers(kind: str, optimizer: Optimizer, tmp_path: Path) -> None:
    plan = gpt(kind, optimizer)
    found = train(TASKS["gpt"], plan, CLUSTER, pieces_of("gpt"), 5, folder=tmp_path)
    wanted, averages = plain_torch(plan, 5)
    assert_same(found, wanted, 2e-5)
    checkpoint = open_checkpoint(latest(tmp_path))  # type: ignore[arg-type]
    for name, average in averages.items():
        assert torch.allclose(checkpoint.read(name, "average").view(average.shape), average, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("before,after", [("stages", "sharded"), ("sharded", "alone")])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_they_go_on_under_another_plan(before: str, after: str, optimizer: Optimizer, tmp_path: Path) -> None:
    first, second = gpt(before, optimizer), gpt(after, optimizer)
    begun = train(TASKS["gpt"], first, CLUSTER, pieces_of("gpt"), 3, folder=tmp_path / "a")
    ended = train(
        TASKS["gpt"], second, CLUSTER, pieces_of("gpt"), 6, resume=latest(tmp_path / "a"), folder=tmp_path / "b"
    )
    wanted, averages = plain_torch(first, 6)
    assert_same(Result(begun.losses + ended.losses, ended.weights), wanted, 3e-5)
    checkpoint = open_checkpoint(latest(tmp_path / "b"))  # type: ignore[arg-type]
    for name, average in averages.items():
        assert torch.allclose(checkpoint.read(name, "average").view(average.shape), average, rtol=1e-4, atol=1e-6)


def test_patterns_that_match_nothing_are_refused() -> None:
    graph = pieces_of("gpt").graph
    group = ParameterGroup(parameters=("*.bais",))
    with pytest.raises(JobError, match="matches no parameter"):
        check_groups(Job(name="j", model="m", batch=1, optimizer=Optimizer(groups=(group,))), graph)
    check_groups(Job(name="j", model="m", batch=1, optimizer=Optimizer(groups=GROUPS)), graph)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(JobError, match="matches no parameter"):
        freeze(model, ["3.*"], "job j")
    freeze(model, ["0.*"], "job j")
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]
    with pytest.raises(JobError, match="every parameter is frozen"):
        freeze(model, ["*"], "job j")
