"""Job and workload files: the published example read by hand, every rule broken once, mutated files."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import JobError
from isthmus.model.job import Job, Optimizer, Workload
from isthmus.model.load_job import check_job, load_job, load_jobs, load_workload, parse_jobs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "jobs"

GPT = """kind: job
version: 1
name: gpt2-xl
model: zoo:gpt2-xl
batch: 256
sequence: 1024
steps: 1000
optimizer: {name: adamw, learning_rate: 3e-4, betas: [0.9, 0.95], weight_decay: 0.1, clip: 1.0}
precision: bf16
seed: 0
data: synthetic
loss: default
sparsity: 0.9
place: {"transformer.h.0*": frankfurt, "lm_head.weight": va1}
priority: 1
deadline: 12 h
"""

PAIR = """kind: workload
version: 1
name: pair
jobs:
  - {name: one, model: "zoo:gpt2", batch: 8}
  - name: two
    model: my.models:build
    batch: 16
"""


def test_the_example_read_by_hand() -> None:
    assert parse_jobs(GPT) == Job(
        name="gpt2-xl",
        model="zoo:gpt2-xl",
        batch=256,
        sequence=1024,
        steps=1000,
        optimizer=Optimizer(name="adamw", learning_rate=0.0003, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
        precision="bf16",
        sparsity=0.9,
        place={"transformer.h.0*": "frankfurt", "lm_head.weight": "va1"},
        deadline="12 h",
    )


def test_a_workload_is_jobs_in_order() -> None:
    workload = parse_jobs(PAIR)
    assert isinstance(workload, Workload)
    assert [(job.name, job.batch) for job in workload.jobs] == [("one", 8), ("two", 16)]


def test_files_by_kind(tmp_path: Path) -> None:
    for name, text in (("job", GPT), ("workload", PAIR)):
        (tmp_path / name).write_text(text)
    assert load_job(tmp_path / "job") == load_jobs(tmp_path / "job") == parse_jobs(GPT)
    assert load_workload(tmp_path / "workload") == load_jobs(tmp_path / "workload") == parse_jobs(PAIR)
    with pytest.raises(JobError, match=r"Found a workload file\. Expected a job file"):
        load_job(tmp_path / "workload")
    with pytest.raises(JobError, match=r"Found a job file\. Expected a workload file"):
        load_workload(tmp_path / "job")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_loads(path: Path) -> None:
    assert load_jobs(path).name == path.stem


REFUSED = [
    ("batch: 256", "batch: 0", 5, "batch has an impossible value. Found 0"),
    ("batch: 256", "batch: 2.5", 5, "Expected a whole number"),
    ("batch: 256\n", "", 1, "lacks the field 'batch'"),
    ("batch: 256", "bacth: 256", 5, "unknown field 'bacth'"),
    ("sequence: 1024", "sequence: -1", 6, "sequence has an impossible value"),
    ("steps: 1000", "steps: 0", 7, "steps has an impossible value"),
    ("seed: 0", "seed: -1", 10, "seed has an impossible value"),
    ("sparsity: 0.9", "sparsity: 1", 13, "less than 1"),
    ("sparsity: 0.9", "sparsity: -0.1", 13, "0 or more"),
    ("name: adamw", "name: adamm", 8, "Expected one of adam, adamw, sgd. Did you mean 'adam"),
    ("learning_rate: 3e-4", "learning_rate: 0", 8, "optimizer.learning_rate has an impossible value"),
    ("learning_rate: 3e-4", "learning_rate: fast", 8, "Expected a number"),
    ("[0.9, 0.95]", "[0.9, 1.0]", 8, "optimizer.betas has an impossible value"),
    ("[0.9, 0.95]", "[0.9]", 8, "Expected a list of 2"),
    ("clip: 1.0", "clip: 0", 8, "optimizer.clip has an impossible value"),
    ("clip: 1.0", "momentum: 0.9", 8, "adamw has betas instead"),
    ("weight_decay: 0.1", "weight_decay: -1", 8, "weight_decay has an impossible value"),
    ("bf16", "bf61", 9, "Did you mean 'bf16'?"),
    ("name: gpt2-xl", "name: .gpt", 3, "not beginning with"),
    ("zoo:gpt2-xl", "gpt2-xl", 4, "zoo:NAME, hf:CONFIG.json"),
    ("zoo:gpt2-xl", "os.path:a b", 4, "package.module:function"),
    ("synthetic", "imagined", 11, "text:FILE"),
    ("default", "none", 12, "default or package.module:function"),
    ("va1}", '"v a"}', 14, "a region or host"),
    ("priority: 1", "priority: 0", 15, "more than 0"),
    ("deadline: 12 h", "deadline: 12", 16, "Expected text"),
    ("deadline: 12 h", "deadline: soon", 16, "like 12 h"),
    ("deadline: 12 h", "deadline: 0 h", 16, "like 12 h"),
    ("kind: job", "kind: cluster", 1, "isthmus cluster show"),
]


@pytest.mark.parametrize(("old", "new", "line", "text"), REFUSED, ids=[case[1] for case in REFUSED])
def test_refusals(old: str, new: str, line: int, text: str) -> None:
    assert old in GPT
    with pytest.raises(JobError) as caught:
        parse_jobs(GPT.replace(old, new, 1), where="j.yaml")
    assert caught.value.where == f"j.yaml line {line}" and text in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        ("name: two", "name: one", 6, "two jobs are named 'one'. Found it at j.yaml line 5"),
        ("batch: 16", "batch: -16", 8, "jobs[1].batch has an impossible value"),
        ("batch: 16", "batch: 16\n    kind: job", 9, "unknown field 'kind'"),
        ("name: pair", "name: a b", 3, "letters, digits"),
    ],
)
def test_workload_refusals(old: str, new: str, line: int, text: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_jobs(PAIR.replace(old, new, 1), where="j.yaml")
    assert caught.value.where == f"j.yaml line {line}" and text in str(caught.value)


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(JobError, match="line 4: the workload has no jobs"):
        parse_jobs("kind: workload\nversion: 1\nname: x\njobs: []")


def test_jobs_given_by_flags_keep_the_same_rules() -> None:
    good = Job(name="x", model="zoo:gpt2", batch=1)
    assert check_job(good) is good
    for broken in ({"batch": 0}, {"sparsity": float("nan")}, {"priority": float("inf")}, {"model": ""}):
        with pytest.raises(JobError, match=f"the command line: {next(iter(broken))} has an impossible value"):
            check_job(msgspec.structs.replace(good, **broken), where="the command line")


WRONG: list[Any] = [None, True, 0, -1, 2.5, 1e300, "", "x", "1 s", [], {}, [0.5, 0.5], {"a": "b"}]


@given(st.data())
@settings(max_examples=120)
def test_mutated_jobs_give_a_job_or_our_error(data: st.DataObject) -> None:
    tree = copy.deepcopy(yaml.safe_load(data.draw(st.sampled_from([GPT, PAIR]))))
    holders = [tree, *(item for item in tree.values() if isinstance(item, dict)), *tree.get("jobs", [])]
    for _ in range(data.draw(st.integers(1, 3))):
        holder = data.draw(st.sampled_from(holders))
        key = data.draw(st.sampled_from([*holder, "kind", "name", "mixed"]))
        holder[key] = data.draw(st.sampled_from(WRONG))
        if data.draw(st.booleans()):
            del holder[key]
    try:
        jobs = parse_jobs(yaml.safe_dump(tree, sort_keys=False), where="j.yaml")
    except JobError as problem:
        assert (problem.where or "").startswith("j.yaml line ")
    else:
        for job in jobs.jobs if isinstance(jobs, Workload) else [jobs]:
            assert job.batch >= 1 and check_job(job) is job


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_defaults_of_the_optimizer_are_those_of_torch(name: str) -> None:
    """Held against the optimizer that the runtime makes, and against torch's own with nothing given."""
    import torch

    from isthmus.runtime.optimizer import _optimizer

    weights = [torch.nn.Parameter(torch.ones(3))]
    theirs = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name](weights).defaults
    ours = _optimizer(Optimizer(name=name), {0: weights}).defaults  # type: ignore[arg-type]
    assert {key: value for key, value in ours.items() if key != "fused"} == {
        key: value for key, value in theirs.items() if key != "fused"
    }


def test_a_given_weight_decay_stays() -> None:
    assert Optimizer(weight_decay=0.0).decay == 0.0
    assert Optimizer(name="sgd", weight_decay=0.1).decay == 0.1
    assert msgspec.convert({"name": "sgd"}, Optimizer) == Optimizer(name="sgd", weight_decay=0.0)


def test_a_warm_up_ends_before_the_schedule_does() -> None:
    job = "kind: job\nversion: 1\nname: j\nmodel: zoo:mlp-tiny\nbatch: 1\nsteps: 10\noptimizer: {schedule: {%s}}\n"
    for text, good in (
        ("shape: cosine, warmup: 10", True),
        ("shape: cosine, warmup: 11", False),
        ("shape: cosine, warmup: 11, steps: 20", True),
        ("shape: warmup-stable-decay, warmup: 5, decay: 6", False),
    ):
        if good:
            parse_jobs(job % text)
        else:
            with pytest.raises(JobError, match="within the 10 steps of the schedule"):
                parse_jobs(job % text)
