"""What limits a plan, in words: the device that computes most, the link that is loaded most, or neither."""

from __future__ import annotations

from isthmus.cost.timeline import Timeline
from isthmus.report.text import percent

__all__ = ["limit_words"]

_FULL = 0.9  # of a step: from here on it alone limits the plan
_MOSTLY = 0.6


def limit_words(timeline: Timeline) -> str:
    """One or two sentences about the busiest device and the busiest link."""
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
    if max(share, link.load) < _MOSTLY:
        return (
            f"Waiting limits it: no device and no link is busy throughout. The busiest device, {device.name}, "
            f"computes during {percent(share)} of the step; {carries}."
        )
    how = "limits" if max(share, link.load) >= _FULL else "mostly limits"
    if share >= link.load:
        return f"Computing {how} it: {computes}; {carries}."
    return (
        f"The network {how} it: {carries.replace(' of it', ' of the step')}; {device.name} computes {percent(share)}."
    )
