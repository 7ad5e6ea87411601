"""Units as types, and their text forms.

In files a quantity is always written with its unit: `40 GB`, `25 Gbit/s`, `0.1 ms`, `35 TFLOP/s`.
Decimal prefixes are powers of 1000 (GB), binary ones powers of 1024 (GiB). Bits need `bit`, bytes need `B`; `Gbps` is
`Gbit/s`, as networks are sold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NewType

__all__ = [
    "Bytes",
    "BytesPerSecond",
    "Flops",
    "FlopsPerSecond",
    "Seconds",
    "close_quantity",
    "format_bandwidth",
    "format_bit_rate",
    "format_byte_rate",
    "format_bytes",
    "format_compute",
    "format_flops",
    "format_seconds",
    "parse_bandwidth",
    "parse_bytes",
    "parse_compute",
    "parse_seconds",
]

Seconds = NewType("Seconds", float)
Bytes = NewType("Bytes", float)
Flops = NewType("Flops", float)
BytesPerSecond = NewType("BytesPerSecond", float)
FlopsPerSecond = NewType("FlopsPerSecond", float)

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {p + "i": 1024**n for n, p in enumerate("KMGTPE", start=1)}
_TIME: dict[str, int | Fraction] = {
    "ns": Fraction("1e-9"),
    "us": Fraction("1e-6"),
    "ms": Fraction("1e-3"),
    "s": 1,
    "min": 60,
    "h": 3600,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z/]+)\s*", re.ASCII)
_LONGEST = 64


def _quantity(text: str, expected: str, factors: Mapping[str, int | Fraction]) -> float:
    """Return the number times its unit's factor, rounded once (`5 us` is 5e-6 to the last bit).

    Raise ValueError that says what was expected.
    """
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    factor = factors.get(match[2]) if match else None
    try:
        if match and factor is not None:
            return float(Fraction(match[1]) * factor)
    except OverflowError:
        pass  # beyond every float, which is as wrong as a missing unit
    raise ValueError(f"a number with its unit, like {expected}")


_BYTES = {p + "B": f for p, f in (_DECIMAL | _BINARY).items()}
_BITS = {p + "bit": Fraction(f, 8) for p, f in (_DECIMAL | _BINARY).items()}
_PER_SECOND = {p + "bps": Fraction(f, 8) for p, f in _DECIMAL.items()}
_BANDWIDTH = {unit + "/s": f for unit, f in (_BYTES | _BITS).items()} | _PER_SECOND
_COMPUTE = {p + "FLOP/s": f for p, f in _DECIMAL.items()}
_UNITS = tuple(dict.fromkeys((*_TIME, *_BYTES, *_BANDWIDTH, *_COMPUTE)))


def parse_bytes(text: str) -> Bytes:
    """Return the bytes that a text gives: `40 GB` is 4e10."""
    return Bytes(_quantity(text, "40 GB", _BYTES))


def parse_bandwidth(text: str) -> BytesPerSecond:
    """Return the bytes a second that a text gives: `25 Gbit/s` or `25 Gbps` is 3.125e9, `300 GB/s` is 3e11."""
    return BytesPerSecond(_quantity(text, "25 Gbit/s or 300 GB/s", _BANDWIDTH))


def parse_seconds(text: str) -> Seconds:
    """Return the seconds that a text gives: `44 ms` is 0.044."""
    return Seconds(_quantity(text, "44 ms", _TIME))


def parse_compute(text: str) -> FlopsPerSecond:
    """Return the FLOP/s that a text gives: `35 TFLOP/s` is 3.5e13."""
    return FlopsPerSecond(_quantity(text, "35 TFLOP/s", _COMPUTE))


def close_quantity(text: str, parse: Callable[[str], float]) -> str | None:
    """Return `Did you mean 1 Gbps?` for `1 gbps`, with the units that `parse` reads and that are spelt similarly."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        return None
    number, unit = match[1], match[2]
    known = [other for other in _UNITS if _reads(f"1 {other}", parse)]
    same = [other for other in known if other.casefold() in (unit.casefold(), f"{unit.casefold()}/s")]
    if "B" in unit or not same or same[0].endswith("B/s"):  # bytes or bits: only the author can say
        spelt = (_spelt(unit), f"{_spelt(unit)}/s")
        same = [other for other in known if _spelt(other) in spelt and not other.endswith("bps")]
    return f"Did you mean {' or '.join(f'{number} {other}' for other in same)}?" if same else None


def _spelt(unit: str) -> str:
    """Return the unit in one spelling: no capitals, `b` for `bit`, `/s` for `ps`."""
    return unit.casefold().replace("flops", "flop/s").replace("bit", "b").replace("bps", "b/s")


def _reads(text: str, parse: Callable[[str], float]) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _scaled(value: float, unit: str) -> str:
    for prefix in ("E", "P", "T", "G", "M", "k"):
        if abs(value) >= _DECIMAL[prefix] * 0.99995:
            return f"{value / _DECIMAL[prefix]:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def format_bytes(value: float) -> str:
    """Return bytes as text: 4e10 as `40 GB`."""
    return _scaled(value, "B")


def format_bandwidth(value: float) -> str:
    """Return bytes a second as text: 3.125e9 as `25 Gbit/s` (links are sold in bits), 3e11 as `300 GB/s`."""
    return format_byte_rate(value) if value >= 2e10 else format_bit_rate(value)


def format_bit_rate(value: float) -> str:
    """Return bytes a second as bits, for tables of links and nics: 3.125e9 as `25 Gbit/s`, even if it is much."""
    return _scaled(value * 8, "bit/s")


def format_byte_rate(value: float) -> str:
    """Return bytes a second as bytes, for tables of memory and buses: 1.2e10 as `12 GB/s`, even if it is little."""
    return _scaled(value, "B/s")


def format_flops(value: float) -> str:
    """Return FLOPs as text: 3.5e13 as `35 TFLOP`."""
    return _scaled(value, "FLOP")


def format_compute(value: float) -> str:
    """Return FLOPs a second as text: 3.5e13 as `35 TFLOP/s`."""
    return _scaled(value, "FLOP/s")


def format_seconds(value: float) -> str:
    """Return seconds as text: 0.044 as `44 ms`; hours from 10,000 s on, where four digits of seconds end."""
    if abs(value) >= 9999.5:
        return f"{value / 3600:.4g} h"
    for unit in ("s", "ms", "us"):
        if abs(value) >= float(_TIME[unit]) * 0.99995:
            return f"{value / float(_TIME[unit]):.4g} {unit}"
    return f"{value / 1e-9:.4g} ns"
