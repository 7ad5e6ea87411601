"""The Python verbs, and the list of what is public."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import isthmus
from isthmus.errors import PlanError, UsageError
from isthmus.plan.file import PlanFile
from tests.plan.small_models import chain

VERBS = {"capture", "join", "load_cluster", "load_profile", "plan", "simulate", "train"}
TYPES = {"BlockGraph", "Choice", "Cluster", "IsthmusError", "Job", "Plan", "Profile", "Simulated", "Workload"}


def test_the_public_list() -> None:
    everything = {name: getattr(isthmus, name) for name in isthmus.__all__}
    assert set(everything) == VERBS | TYPES and isthmus.__all__ == sorted(isthmus.__all__)
    assert all(callable(everything[name]) for name in VERBS)
    assert all(isinstance(everything[name], type) for name in TYPES)
    assert set(isthmus.__all__) <= set(dir(isthmus))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = isthmus.trian


def test_the_package_and_the_verb_of_one_name_live_together() -> None:
    code = (
        "import sys, isthmus; assert not {'numpy', 'msgspec', 'torch'} & set(sys.modules); "
        "assert callable(isthmus.plan); import isthmus.plan.types; from isthmus import plan; "
        "assert callable(plan) and plan.types.Plan is isthmus.Plan and 'numba' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_from_a_module_to_a_price(root: Path) -> None:
    import torch
    from torch import nn

    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    graph = isthmus.capture(module, torch.zeros(2, 16), name="mine")
    assert graph.elements == sum(parameter.numel() for parameter in module.parameters())
    cluster = isthmus.load_cluster(root / "examples" / "clusters" / "one-host.yaml")
    choice = isthmus.plan(graph, cluster, batch=8)
    again = isthmus.simulate(choice.plan, cluster, {"mine": graph})
    assert again.price == choice.price
    assert again.timeline.step_seconds == pytest.approx(choice.price.step_seconds)
    with pytest.raises(UsageError, match="example inputs"):
        isthmus.capture(module)


def test_a_job_and_a_cluster_by_name(root: Path, tmp_path: Path) -> None:
    from isthmus.model.saved import save_graph

    path = tmp_path / "small model.json"
    save_graph(chain(), path)
    file = root / "examples" / "clusters" / "one-host.yaml"
    by_name = isthmus.plan(str(path), file, batch=8, calls=30)
    job = isthmus.Job(name="small-model", model=str(path), batch=8)
    by_job = isthmus.plan(job, isthmus.load_cluster(file), calls=30)
    assert by_name.plan == by_job.plan and by_name.price == by_job.price


def test_simulate_needs_a_cluster_and_trusts_no_plan(root: Path) -> None:
    cluster = isthmus.load_cluster(root / "examples" / "clusters" / "one-host.yaml")
    job = isthmus.Job(name="j", model="some.code:f", batch=8)
    plan = isthmus.plan(chain(), cluster, batch=8, planner="data-even").plan
    with pytest.raises(UsageError, match="does not hold its cluster"):
        isthmus.simulate(plan)
    import msgspec

    part = msgspec.structs.replace(plan.parts[0], job=job)
    foreign = PlanFile(plan=msgspec.structs.replace(plan, parts=(part,)), cluster=cluster)
    with pytest.raises(PlanError, match="does not run code just because"):
        isthmus.simulate(foreign)
    assert isthmus.simulate(foreign, models={"j": chain()}).price.fits


def test_what_is_no_job_and_no_model_is_told_so(root: Path) -> None:
    import torch

    file = root / "examples" / "clusters" / "one-host.yaml"
    module = torch.nn.Linear(2, 2)
    for verb in (isthmus.plan, isthmus.train):
        with pytest.raises(UsageError, match=r"a module must be captured first. isthmus.capture\(module, example\)"):
            verb(module, file)
        with pytest.raises(UsageError, match=r"this is neither a job nor a model. Found an object of type int"):
            verb(5, file)
        with pytest.raises(UsageError, match="this is not a cluster"):
            verb("zoo:mlp-tiny", 5)
    with pytest.raises(UsageError, match="this is not a plan"):
        isthmus.simulate(module)


def test_python_callers_are_told_what_to_trust_in_python(tmp_path: Path) -> None:
    from tests.deploy.jobs import JOB, two_stages, written

    plan = written(tmp_path, two_stages())
    with pytest.raises(PlanError) as caught:
        isthmus.train(plan)
    assert f'trusted=["{JOB.model}", "{JOB.data}"]' in str(caught.value) and "--model" not in str(caught.value)


def test_every_verb_shows_what_it_takes() -> None:
    """`help` and notebooks, also for the verb that is a package as well; held against the function itself."""
    import inspect
    import pydoc

    from isthmus import api

    assert inspect.signature(isthmus.plan) == inspect.signature(api.plan)
    for verb in ("capture", "join", "load_cluster", "load_profile", "plan", "simulate", "train"):
        text = pydoc.render_doc(getattr(isthmus, verb), renderer=pydoc.plaintext)
        assert "*args" not in text
        for parameter in inspect.signature(getattr(isthmus, verb)).parameters:
            assert parameter in text
    text = pydoc.render_doc(isthmus.plan, renderer=pydoc.plaintext)
    assert "simulator calls" in text and "isthmus.plan - Find the fastest plan" in text
    assert 'planner: str = "auto",' in text.replace("'", '"')
    for verb in (api.plan, api.train):
        explained = {line.partition(":")[0] for line in (inspect.getdoc(verb) or "").splitlines()}
        named = {one.name for one in inspect.signature(verb).parameters.values() if one.kind is one.KEYWORD_ONLY}
        assert named <= explained
