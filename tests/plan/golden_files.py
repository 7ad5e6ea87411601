"""The golden plans: text that people wrote, and JSON that must hold the same.

`python -m tests.plan.golden_files` writes the JSON anew.
"""

from __future__ import annotations

from pathlib import Path

from isthmus.cluster.load import load_cluster
from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.plan.file import PlanFile, inputs_digest, load_plan, save_plan
from isthmus.plan.types import Pipeline, Plan
from tests.plan.small_models import chain

__all__ = ["FOLDER", "NAMES", "cluster", "golden", "jobs", "models", "text_path"]

FOLDER = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in FOLDER.glob("*.plan"))


def text_path(name: str) -> Path:
    return FOLDER / f"{name}.plan"


def cluster() -> Cluster:
    """The cluster of all golden plans: three regions, three kinds, trunks."""
    return load_cluster(FOLDER / "atlantic.yaml")


def golden(name: str) -> Plan:
    return load_plan(text_path(name)).plan


def jobs(plan: Plan) -> list[Job]:
    return [
        job
        for part in plan.parts
        for job in ([part.job] if isinstance(part, Pipeline) else [item.job for item in part.jobs])
    ]


def models(plan: Plan) -> dict[str, BlockGraph]:
    """The model of each job: `small:chain` or `small:tied`."""
    known = {"small:chain": chain(), "small:tied": chain(tied=True)}
    return {job.name: known[job.model] for job in jobs(plan)}


def whole_file(name: str) -> PlanFile:
    """What the JSON of a golden plan must say."""
    plan = golden(name)
    digests = {job: graph.digest for job, graph in models(plan).items()}
    inputs = inputs_digest(cluster(), jobs(plan), digests)
    return PlanFile(planner="hand", seed=0, inputs=inputs, plan=plan, cluster=cluster())


if __name__ == "__main__":
    for each in NAMES:
        save_plan(FOLDER / f"{each}.json", whole_file(each))
