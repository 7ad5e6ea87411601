"""Turn what workers measured in a step into the timeline that the simulator also produces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isthmus.cost.timeline import Activity, DeviceUse, Timeline
from isthmus.runtime.protocol import Measured

__all__ = ["measured_timeline"]


def measured_timeline(spans: Mapping[str, Sequence[Measured]], job: str) -> Timeline:
    """Return the timeline of one step, from the first span of any worker to the last; links are not measured."""
    start = min(span.begin for found in spans.values() for span in found)
    end = max(span.end for found in spans.values() for span in found)
    activities = [
        Activity(
            track=worker,
            lane="sync" if span.what == "sync" else "compute",
            kind=span.what,
            job=job,
            label=f"{span.what} {span.label}" + (f" #{span.micro_batch}" if span.what != "sync" else ""),
            start=span.begin - start,
            sent=span.end - start,
            end=span.end - start,
            bytes=0.0,
        )
        for worker, found in spans.items()
        for span in found
    ]
    devices = tuple(_use(worker, found, end - start) for worker, found in spans.items())
    return Timeline(end - start, devices, (), activities)


def _use(worker: str, spans: Sequence[Measured], step: float) -> DeviceUse:
    computing = sum(span.end - span.begin for span in spans if span.what != "sync")
    sending = sum(span.end - span.begin for span in spans if span.what == "sync")
    return DeviceUse(worker, computing, sending, step - computing)
