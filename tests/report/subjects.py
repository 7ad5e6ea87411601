"""Reports to look at: golden plans as they are, and one in which every name is hostile."""

from __future__ import annotations

import msgspec

import isthmus
from isthmus.plan.file import PlanFile
from isthmus.plan.types import Prediction
from isthmus.report.html import Subject
from tests.plan.golden_files import cluster, golden, models

__all__ = ["HOSTILE", "hostile_subject", "subject"]

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "<!-- ' & <svg onload=document.title='owned'>",
    "$style ${script} $$ \u202ereversed\u2028",
)


def subject(name: str) -> Subject:
    """The report of a golden plan, with schemes made up."""
    plan = golden(name)
    done = isthmus.simulate(plan, cluster(), models(plan))
    step = done.price.step_seconds
    predicted = Prediction(
        step_seconds=step,
        jobs=dict(done.price.jobs),
        memory=dict(done.price.memory),
        lower_bound_seconds=step / 2,
        baselines={"data": 1.5 * step, "grid": 60 * step, "pipeline": None},
    )
    file = PlanFile(planner="hand", seed=3, inputs="0" * 64, plan=plan, cluster=cluster(), predicted=predicted)
    return Subject(file=file, cluster=cluster(), price=done.price, timeline=done.timeline, made="today by nobody")


def hostile_subject() -> Subject:
    """All that a plan file or cluster may name, named badly; no file of ours lets all of it through."""
    given = subject("two-depths")
    regions = dict(zip(given.cluster.regions, HOSTILE[:3], strict=True))
    hosts = {
        name: msgspec.structs.replace(host, region=regions[host.region]) for name, host in given.cluster.hosts.items()
    }
    links = tuple(
        msgspec.structs.replace(link, between=tuple(regions[end] for end in link.between))
        for link in given.cluster.links
    )
    machines = msgspec.structs.replace(given.cluster, name=HOSTILE[0], hosts=hosts, links=links)
    part = given.file.plan.parts[0]
    job = msgspec.structs.replace(part.job, name=HOSTILE[1], model=HOSTILE[3])
    syncs = tuple(msgspec.structs.replace(sync, bucket=HOSTILE[0]) for sync in part.syncs)
    plan = msgspec.structs.replace(
        given.file.plan, cluster=HOSTILE[2], parts=(msgspec.structs.replace(part, job=job, syncs=syncs),)
    )
    activities = tuple(
        activity._replace(job=HOSTILE[1], label=HOSTILE[number % 4] + " #1")
        for number, activity in enumerate(given.timeline.activities)
    )
    return Subject(
        file=msgspec.structs.replace(given.file, plan=plan, planner=HOSTILE[2], inputs=HOSTILE[3]),
        cluster=machines,
        price=given.price._replace(jobs={HOSTILE[1]: given.price.step_seconds}),
        timeline=given.timeline._replace(activities=activities),
        made=HOSTILE[0],
    )
