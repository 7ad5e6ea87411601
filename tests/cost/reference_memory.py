"""Peak bytes of a pipeline's devices, again: from the docstring of `cost.memory`, on names and lists."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from isthmus.plan.resolve import ResolvedSync
from tests.cost.reference_costs import StageFacts
from tests.cost.reference_order import Flows, Run
from tests.cost.reference_tasks import segments_of

if TYPE_CHECKING:
    from tests.cost.reference_plan import PipelineWriter

__all__ = ["pipeline_memory"]

Bytes = dict[str, float]
Row = tuple[str, tuple[str, ...], str | None, float, int, bool]  # how, devices, root, bytes, segments, only pieces
Way = tuple[str, str, float, float]  # from, to, bytes to be added, bytes of a segment


def pipeline_memory(written: PipelineWriter, device_bytes: Bytes, host_bytes: Bytes) -> None:
    """Adds state, live activations, the model's buffers, and room for what runs send each other and for syncs."""
    part = written.part
    for run in written.runs:
        for s, _ in run.copies:
            facts = StageFacts(part, s, written.cluster.kind_of(run.device))
            cuts = sorted(written.cuts[run.number])
            parts = [range(a, b) for a, b in zip(cuts, [*cuts[1:], written.blocks(run)[-1] + 1], strict=True)]
            parts = [span for span in parts if span[0] in facts.range]
            on_device, on_host = facts.state(len(run.devices), parts)
            for device in run.devices:
                _add(device_bytes, device, on_device)
                _add(host_bytes, written.cluster.host_of(device).name, on_host)
    for device, order in written.orders.items():
        peak = live_peak(written, order)
        peak += sum(between_runs(written, device, flows) for flows in (written.forward, written.backward))
        for member in dict.fromkeys(d for u in written.runs if u.device == device for d in u.devices):
            _add(device_bytes, member, peak)
    for device in {device for run in written.runs for device in run.devices}:
        _add(device_bytes, device, 4.0 * part.graph.buffers)
    for device, size in (*scratch(written), *sums_of_roots(written), *factor_rooms(written)):
        _add(device_bytes, device, size)


def _add(sums: Bytes, key: str, more: float) -> None:
    sums[key] = sums.get(key, 0.0) + more


def gaps(written: PipelineWriter, device: str, s: int) -> float:
    """Bytes of memory for each byte that a stage allocates on a device."""
    costs = written.profile.device_costs.get(written.cluster.devices[device].kind)
    if costs is None:
        return 1.0
    return costs.held_recomputed if written.stage(s).recompute else costs.held


def live_peak(written: PipelineWriter, order: list[tuple[int, str, int]]) -> float:
    live = peak = 0.0
    for u, way, _ in order:
        run = written.runs[u]
        kind = written.cluster.kind_of(run.device)
        stages = [(StageFacts(written.part, s, kind), gaps(written, run.device, s)) for s, _ in run.copies]
        kept = run.share * sum(gap * stage.saved(len(run.devices)) for stage, gap in stages)
        slice_ = max(hi - lo for lo, hi in map(run.slice, range(run.slices)))
        live += kept if way == "F" else 0.0
        peak = max(peak, live + slice_ * max(gap * stage.transient() for stage, gap in stages))
        live -= kept if way == "B" else 0.0
    return peak


def between_runs(written: PipelineWriter, device: str, flows: Flows) -> float:
    """Up to 16 messages of each flow that leaves a device in a step, up to 5 of each that comes, of average size."""
    total = 0.0
    for (u, v), (each, always) in flows.items():
        a, b = written.runs[u], written.runs[v]
        if a.device == b.device:
            continue
        sizes = [both * each + always for both in _common(a, b)]
        for run, most, gap in ((a, 16, gaps(written, a.device, a.copies[0][0])), (b, 5, 1.0)):
            if run.device == device:
                count = min(most, written.micro * len(sizes))
                total += gap * count * sum(sizes) / len(sizes)
    return total


def _common(a: Run, b: Run) -> list[int]:
    """Samples that each pair of slices has in common."""
    pairs = [(a.slice(k), b.slice(j)) for k in range(a.slices) for j in range(b.slices)]
    return [both for (lo, hi), (low, high) in pairs if (both := min(hi, high) - max(lo, low)) > 0]


def scratch(written: PipelineWriter) -> Iterator[tuple[str, float]]:
    """Of all that is added from one device by syncs in a row: a segment of each and 4 MiB or, far, up to 64 MiB."""
    for _, alike in groupby(every_row(written), key=lambda row: row[:3] if row else None):
        ways: dict[tuple[str, str], list[float]] = {}
        for row in alike:
            for sender, receiver, added, segment in ways_of(written, row) if row else ():
                sums = ways.setdefault((sender, receiver), [0.0, 0.0])
                sums[0] += added
                sums[1] += segment
        for (sender, receiver), (added, segments) in ways.items():
            yield receiver, min(added, room(trip(written, sender, receiver)) + segments)


def every_row(written: PipelineWriter) -> Iterator[Row | None]:
    """None stands where other syncs are: what is before and after them is not in a row."""
    for sync in written.part.syncs:
        if sync.how in ("duplicate", "factors"):
            yield None
        else:
            yield from rows_of(written, sync)


def rows_of(written: PipelineWriter, sync: ResolvedSync) -> Iterator[Row]:
    """A sync by the devices that send: that of equal tensor groups member by member."""
    leads, degree = written.leads(sync), written.degree(sync)
    size, pieces = written.bucket_bytes(sync, degree), written.states(sync) == {"sharded-optimizer"}
    how = "ring" if sync.how == "sparse" else sync.how
    root = None if sync.root is None else written.names[sync.root]
    for member in range(degree):
        devices = [written.group(sync, lead)[member] for lead in leads] if degree > 1 else leads
        yield how, tuple(devices), root, size, sync.segments, pieces


def trip(written: PipelineWriter, a: str, b: str) -> float:
    return written.w.net.latency(a, b) + written.w.net.latency(b, a)


def room(seconds: float) -> float:
    return max(2.0**22, min(2.5e9 * seconds, 2.0**26))


def ways_of(written: PipelineWriter, row: Row) -> Iterator[Way]:
    how, devices, root, size, planned, pieces = row
    if how == "ring":
        yield from around(written, devices, size, planned, pieces)
    elif how == "tree":
        regions: dict[str, list[str]] = {}
        for device in devices:
            regions.setdefault(written.cluster.host_of(device).region, []).append(device)
        for chain in regions.values():
            for near, far in pairwise(chain):
                yield far, near, size, size / segments_of(size, planned)
        yield from around(written, tuple(chain[0] for chain in regions.values()), size, planned, pieces)
    else:
        assert root is not None
        for device in devices if root in devices else devices[1:]:
            if device != root:
                yield device, root, size, size / segments_of(size, planned)


def around(written: PipelineWriter, devices: tuple[str, ...], size: float, planned: int, pieces: bool) -> Iterator[Way]:
    n = len(devices)
    if not pieces and (size <= 32768 or (n == 2 and trip(written, devices[0], devices[1]) > 0.002)):
        piece, planned = size, 2 * planned
    else:
        piece = size / n
    for i in range(n):
        if n > 1:
            yield devices[i - 1], devices[i], (n - 1) * piece, piece / segments_of(piece, planned)


def sums_of_roots(written: PipelineWriter) -> Iterator[tuple[str, float]]:
    """A root that has no part in a bucket works on a tensor of its own."""
    for how, devices, root, size, _, _ in (row for row in every_row(written) if row):
        if how == "server" and root is not None and root not in devices:
            yield root, size


def factor_rooms(written: PipelineWriter) -> Iterator[tuple[str, float]]:
    """Own output gradients of a micro-batch; of each stage, rows of everybody for as many weights as there is room."""
    whole: dict[tuple[str, int], float] = {}
    least: dict[tuple[str, int], float] = {}
    for sync in (sync for sync in written.part.syncs if sync.how == "factors"):
        linear = [x for name in sync.parameters if (x := written.graph.parameter[name].linear)]
        users = [u for u in written.runs if written.users(sync, u)]
        runs = [next(u for u in users if u.device == lead) for lead in written.leads(sync)]
        samples, stage = sum(run.share for run in runs), written.stages_of(sync)[-1]
        blocks = [b for b, block in enumerate(written.graph.blocks) if set(block.parameters) & set(sync.parameters)]
        names = {name for b in blocks for name in written.graph.blocks[b].parameters}
        largest = max(
            (x.rows * (x.inputs + x.outputs) for name in names if (x := written.graph.parameter[name].linear)),
            default=0.0,
        )
        members = range(written.degree(sync))
        for run in runs:
            for member in members:
                device, others = run.devices[member], [other.devices[member] for other in runs]
                yield device, run.share * written.width * sum(x.rows * x.outputs for x in linear)
                each = sum(x.rows * (x.inputs + x.outputs) for x in linear)
                whole[device, stage] = whole.get((device, stage), 0.0) + samples * written.width * each
                far = max(trip(written, device, other) for other in others)
                wanted = max(room(far), 2 * samples * written.width * largest)
                least[device, stage] = max(least.get((device, stage), 0.0), wanted)
    for (device, stage), size in whole.items():
        yield device, min(size, least[device, stage])
