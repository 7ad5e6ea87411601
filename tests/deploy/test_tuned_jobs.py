"""A job with a schedule, groups, an average and frozen parameters: planned, trained by processes, and exported."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import isthmus
from isthmus.errors import JobError, ModelError
from isthmus.model import source
from isthmus.model.job import Job, Optimizer, ParameterGroup, RateSchedule
from isthmus.runtime.checkpoint.reading import export, latest, open_checkpoint
from isthmus.runtime.data.sample_order import SampleOrder
from isthmus.runtime.data.sources import open_samples
from tests.deploy.jobs import two_devices

JOB = Job(
    name="tuned", model="zoo:mlp-tiny", batch=8, steps=5, precision="fp32", seed=1, frozen=("layers.0.*",),
    optimizer=Optimizer(
        learning_rate=1e-2, average=0.9, schedule=RateSchedule(shape="linear", warmup=1),
        groups=(ParameterGroup(parameters=("*.bias",), weight_decay=0.0),),
    ),
)  # fmt: skip


def test_frozen_parameters_are_no_parameters_to_the_planner() -> None:
    whole = source.load_graph("zoo:mlp-tiny")
    rest = source.load_graph("zoo:mlp-tiny", frozen=("layers.0.*",))
    assert {p.name for p in whole.parameters} - {p.name for p in rest.parameters} == {
        "layers.0.weight",
        "layers.0.bias",
    }
    assert rest.digest != whole.digest and rest.buffers > whole.buffers
    with pytest.raises(JobError, match="matches no parameter"):
        source.load_graph("zoo:mlp-tiny", frozen=("layer.0.*",))


def test_a_captured_model_cannot_be_frozen(tmp_path: Path) -> None:
    source.save_graph(source.load_graph("zoo:mlp-tiny"), tmp_path / "m.json")
    with pytest.raises(ModelError, match="cannot be frozen afterwards"):
        source.load_graph(str(tmp_path / "m.json"), frozen=("layers.0.*",))


def test_a_pattern_of_a_group_is_checked_before_planning() -> None:
    group = ParameterGroup(parameters=("*.bais",), weight_decay=0.0)
    job = msgspec.structs.replace(JOB, optimizer=Optimizer(groups=(group,)))
    with pytest.raises(JobError, match=r"the pattern matches no parameter.*Found \*\.bais"):
        isthmus.plan(job, two_devices(), calls=5)


@pytest.mark.slow("starts processes twice")
def test_it_trains_as_plain_torch_does_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    cluster = two_devices()
    first = isthmus.plan(JOB, cluster, planner="data-even", calls=50)
    second = isthmus.plan(JOB, cluster, planner="pipeline", calls=50)
    assert first.plan != second.plan
    begun = isthmus.train(first.plan, cluster, steps=2, checkpoint=tmp_path / "run")
    ended = isthmus.train(second.plan, cluster, steps=5, checkpoint=tmp_path / "run", resume=True)
    losses, weights, averages, initial = plain_torch()
    assert [*begun.losses, *ended.losses] == pytest.approx(losses, rel=1e-5)
    checkpoint = open_checkpoint(latest(tmp_path / "run"))  # type: ignore[arg-type]
    found = load_file(export(checkpoint, tmp_path / "w.safetensors"))
    mean = load_file(export(checkpoint, tmp_path / "a.safetensors", average=True))
    for name, weight in weights.items():
        assert torch.allclose(found[name], weight, rtol=1e-4, atol=1e-6), name
        if name.startswith("layers.0."):
            assert torch.equal(found[name], initial[name]) and torch.equal(mean[name], initial[name])
        else:
            assert torch.allclose(mean[name], averages[name], rtol=1e-4, atol=1e-6), name


def plain_torch() -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(JOB.seed)
    built = source.build(JOB.model)
    model, samples = built.module, open_samples(JOB, built)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    named = {name: p for name, p in model.named_parameters() if not name.startswith("layers.0.")}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in named)
    biases = [p for name, p in named.items() if name.endswith(".bias")]
    others = [p for name, p in named.items() if not name.endswith(".bias")]
    groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.01)
    order, losses = SampleOrder(seed=JOB.seed, count=samples.count), []
    averages: dict[str, torch.Tensor] = {}
    for step in range(JOB.steps):
        rate = 1e-2 * (0.0 if step == 0 else (JOB.steps - step) / (JOB.steps - 1))
        for group in optimizer.param_groups:
            group["lr"] = rate
        example, target = samples.get(order.numbers(step, JOB.batch))
        loss = torch.nn.functional.cross_entropy(model(*example.args, **example.kwargs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        for name, parameter in named.items():
            old = averages.get(name)
            averages[name] = parameter.detach().clone() if old is None else 0.9 * old + 0.1 * parameter.detach()
    return losses, {name: p.detach() for name, p in model.named_parameters()}, averages, initial
