"""What `plan` and `simulate` both say of a priced plan, for programs."""

from __future__ import annotations

from typing import Any

from isthmus.cluster.spec import Cluster
from isthmus.cost.simulate import Price
from isthmus.model.job import Job
from isthmus.plan.types import Plan
from isthmus.report.plan import precisions

__all__ = ["price_values"]


def price_values(cluster: Cluster, jobs: tuple[Job, ...], plan: Plan, price: Price) -> dict[str, Any]:
    """Step times, and memory with its limit by device. `precision` is null where jobs differ in it."""
    computed = precisions(plan)
    distinct = set(computed.values())
    return {
        "step_seconds": price.step_seconds,
        "feasible": price.fits,
        "precision": distinct.pop() if len(distinct) == 1 else None,
        "jobs": {
            job.name: {
                "model": job.model,
                "batch": job.batch,
                "precision": computed[job.name],
                "step_seconds": price.jobs[job.name],
            }
            for job in jobs
        },
        "memory": dict(price.memory),
        "limits": {device: cluster.kind_of(device).memory for device in price.memory},
        "shortages": [shortage._asdict() for shortage in price.shortages],
    }
