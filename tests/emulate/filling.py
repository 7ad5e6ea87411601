"""Max-min fair rates by progressive filling, written to be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def fair_rates(capacity: Mapping[str, float], flows: Sequence[Iterable[str]]) -> list[float]:
    """All rates rise together; when a resource is full, its flows stay where they are."""
    rates = [0.0] * len(flows)
    rising = set(range(len(flows)))
    while rising:
        room = {}
        for name, most in capacity.items():
            users = [n for n, flow in enumerate(flows) if name in flow]
            if rising & set(users):
                room[name] = (most - sum(rates[n] for n in users)) / len(rising & set(users))
        least = min(room.values())
        for n in rising:
            rates[n] += least
        full = {name for name, left in room.items() if left <= least * (1 + 1e-9)}
        rising = {n for n in rising if not full & set(flows[n])}
    return rates
