"""The last lines of the page: what it was made from, and every value that was filled in."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.cluster.spec import Cluster, Host
from isthmus.plan.file import PlanFile
from isthmus.plan.types import Plan
from isthmus.report.class_names import host_classes
from isthmus.report.markup import Markup, join, tag
from isthmus.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["notes"]

_RAN = "The run was measured; bars, map, timeline and memory are predictions of a simulator."
_MOST = 60  # lines of imputed values


def notes(
    file: PlanFile, cluster: Cluster, times: Sequence[tuple[str, str]], made: str, same: bool, ran: bool = False
) -> Markup:
    """Return facts in two columns, with those of `times`, then the imputed values; `ran` means there was a run."""
    facts = [
        ("what this is", _RAN if ran else "Predictions of a simulator, not measurements."),
        ("cluster", cluster.name if same else f"{cluster.name}: not the cluster the plan was made for"),
        *_models(file.plan),
        *times,
        ("seed", str(file.seed)),
        *([("hash of the inputs", file.inputs)] if file.inputs else []),
        ("written", made),
    ]
    pairs = [part for name, value in facts for part in (tag("dt", name), tag("dd", value))]
    return join([tag("dl", *pairs, class_="facts"), _imputed(cluster)])


def _models(plan: Plan) -> list[tuple[str, str]]:
    found = []
    for item in plan.job_parts:
        chosen = "" if item.job.precision else f", {item.precision}: the fastest that every kind of device offers"
        digest = f", digest {item.model_digest}" if item.model_digest else ""
        found.append((f"model of {item.job.name}", f"{item.job.model}{chosen}{digest}"))
    return found


def _imputed(cluster: Cluster) -> Markup:
    lines = [
        f"{name}: {', '.join(f'{field} {_value(hosts[0], field)}' for field in sorted(hosts[0].imputed))}"
        for name, hosts in host_classes(cluster)
        if hosts[0].imputed
    ]
    lines += [
        f"link {' - '.join(link.between)}: latency {format_seconds(link.latency)}"
        for link in cluster.links
        if "latency" in link.imputed
    ]
    if not lines:
        return tag("p", "Every value of the cluster was given; none was filled in.", class_="note")
    more = [tag("li", f"and {len(lines) - _MOST} more")] if len(lines) > _MOST else []
    summary = tag("summary", "Values that the cluster file does not give ", tag("small", f"{len(lines)} filled in"))
    said = tag("p", "From the catalog, or the usual value. Measure what matters.", class_="note")
    return tag("details", summary, said, tag("ul", *(tag("li", line) for line in lines[:_MOST]), *more, class_="plain"))


def _value(host: Host, field: str) -> str:
    value = getattr(host, field)
    if field == "latency":
        return format_seconds(value)
    if field == "memory":
        return format_bytes(value)
    return str(value) if field == "cores" else format_bandwidth(value)
