"""Where block times and sync times come from, for people and for programs."""

from __future__ import annotations

from typing import Any

from isthmus.cost.sources import Sources, TimesUsed
from isthmus.model.profile import Profile

__all__ = ["times_facts", "times_values"]

_MOST_NAMES = 4
_MOST_REASONS = 2


def times_facts(used: TimesUsed, profile: Profile | None, name: str) -> list[tuple[str, str]]:
    """Return facts in two columns about where times come from.

    They are `times`; `syncs` and `overheads`, if the profile and the plan have any; and a warning if the profile does
    not apply.
    """
    if profile is None:
        return [("times", "roofline from the catalog")]
    facts = [("times", f"{_counts(used.blocks, name)} from the catalog")]
    if profile.collectives and used.syncs.total:
        facts.append(("syncs", f"{_counts(used.syncs, name)} simulated on the links{_why(used)}"))
    if used.overheads:
        facts.append(("overheads", f"measured for {', '.join(used.overheads)} ({name})"))
    if not used.known:
        facts.append(("warning", f"{name} has no times for this model on these devices; {_contents(profile)}"))
    return facts


def times_values(used: TimesUsed, profile: Profile | None, name: str | None) -> dict[str, Any]:
    """Return the same facts for `--json`."""
    facts = dict(times_facts(used, profile, name or "the profile"))
    return {
        "profile": name,
        **used.blocks._asdict(),
        "syncs": {**used.syncs._asdict(), "played": [{"why": why, "syncs": count} for why, count in used.played]},
        "overheads": list(used.overheads),
        "text": facts["times"],
        "warning": facts.get("warning"),
    }


def _counts(sources: Sources, name: str) -> str:
    return (
        f"{sources.measured} of {sources.total} measured ({name}), {sources.interpolated} interpolated, "
        f"{sources.estimated}"
    )


def _why(used: TimesUsed) -> str:
    """Return why syncs are played, with the commonest reasons first."""
    reasons = sorted(used.played, key=lambda reason: -reason[1])
    shown = [f"{why} ({count})" for why, count in reasons[:_MOST_REASONS]]
    more = len(reasons) - len(shown)
    return f": {'; '.join(shown)}{f'; {more} other reasons' if more else ''}" if reasons else ""


def _contents(profile: Profile) -> str:
    """Return in a few words what a profile knows."""
    if not profile.blocks and not profile.collectives and not profile.devices:
        return "it has no points"
    blocks = len({time.block for time in profile.blocks})
    said = []
    if blocks:
        kinds = _names({f"{time.device} in {time.precision}" for time in profile.blocks})
        said.append(f"{blocks} block{'s' if blocks > 1 else ''} on {kinds}")
    if profile.collectives:
        said.append(f"collectives among {_names({host for time in profile.collectives for host in time.hosts})}")
    if profile.devices:
        said.append(f"overheads of {_names({costs.device for costs in profile.devices})}")
    return f"it has {' and '.join(said)}"


def _names(names: set[str]) -> str:
    shown = sorted(names)[:_MOST_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
