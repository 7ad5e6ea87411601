"""What limits a plan, in words: a device that computes all the time, a link that is always full, or neither.

If it is neither, the step is a chain of both with waiting in between, and only its critical path says what binds
(`isthmus explain`).
"""

from __future__ import annotations

from isthmus.cost.timeline import Timeline
from isthmus.report.columns import percent

__all__ = ["limit_words"]

_FULL = 0.9  # of a step; a device or link that is busy for longer limits the plan by itself


def limit_words(timeline: Timeline) -> str:
    """Return one or two sentences about the busiest device and the busiest link."""
    step = timeline.step_seconds
    if not timeline.devices or step <= 0.0:
        return "Nothing is computed."
    device = max(timeline.devices, key=lambda use: use.computing)
    share = device.computing / step
    computes = f"{device.name} computes during {percent(share)} of the step"
    if not timeline.links:
        return f"Computing limits it: {computes}, and nothing is sent."
    link = max(timeline.links, key=lambda use: use.load)
    carries = f"the link {link.name} is full for {percent(link.load)} of it"
    if max(share, link.load) < _FULL:
        return (
            f"No device and no link is busy throughout: the busiest device, {device.name}, computes during "
            f"{percent(share)} of the step; {carries}. `isthmus explain` follows the step and says what limits it."
        )
    if share >= link.load:
        return f"Computing limits it: {computes}; {carries}."
    return (
        f"The network limits it: {carries.replace(' of it', ' of the step')}; {device.name} computes {percent(share)}."
    )
