"""Quantities: parsing against closed forms, formatting against parsing."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "40 GB", 40 * 10**9),
        (units.parse_bytes, "40GiB", 40 * 2**30),
        (units.parse_bytes, "512 B", 512),
        (units.parse_bytes, "1.5 kB", 1500),
        (units.parse_bytes, "8 bit", None),
        (units.parse_bandwidth, "25 Gbit/s", 25e9 / 8),
        (units.parse_bandwidth, "300 GB/s", 3e11),
        (units.parse_bandwidth, "1 Kibit/s", 128),
        (units.parse_bandwidth, "25 Gbps", 25e9 / 8),
        (units.parse_bandwidth, "100Mbps", 100e6 / 8),
        (units.parse_bandwidth, "64 kbps", 8000),
        (units.parse_bandwidth, "64 Kbps", 8000),
        (units.parse_bandwidth, "800 bps", 100),
        (units.parse_bandwidth, "25 GBps", None),
        (units.parse_bandwidth, "25 gbps", None),
        (units.parse_bandwidth, "1 Gibps", None),
        (units.parse_bytes, "25 Gbps", None),
        (units.parse_bandwidth, "25 GB", None),
        (units.parse_seconds, "44 ms", 0.044),
        (units.parse_seconds, "5 us", 5e-6),
        (units.parse_seconds, "12 h", 43200),
        (units.parse_seconds, "2e-3 s", 0.002),
        (units.parse_seconds, "12", None),
        (units.parse_compute, "35 TFLOP/s", 3.5e13),
        (units.parse_compute, "35 TFLOPS", None),
        (units.parse_compute, "-1 TFLOP/s", None),
        (units.parse_compute, "nan TFLOP/s", None),
        (units.parse_compute, "1e999 TFLOP/s", None),
        (units.parse_compute, "1 2 TFLOP/s", None),
        (units.parse_compute, "٣ TFLOP/s", None),
        (units.parse_compute, "1" * 70 + " FLOP/s", None),
        (units.parse_compute, "", None),
    ],
)
def test_parsing(parse, text, value) -> None:  # type: ignore[no-untyped-def]
    if value is not None:
        assert parse(text) == value
        return
    with pytest.raises(ValueError, match="a number with its unit, like "):
        parse(text)


PAIRS = [
    (units.parse_bytes, units.format_bytes),
    (units.parse_bandwidth, units.format_bandwidth),
    (units.parse_compute, units.format_compute),
    (units.parse_seconds, units.format_seconds),
]


@given(st.sampled_from(PAIRS), st.floats(min_value=1e-12, max_value=1e24))
def test_formatting_parses_back_to_four_digits(pair, value: float) -> None:  # type: ignore[no-untyped-def]
    parse, show = pair
    assert parse(show(value)) == pytest.approx(value, rel=5.1e-4)


@given(st.sampled_from(PAIRS), st.floats(min_value=1e-9, max_value=1e7))
def test_a_unit_is_the_largest_that_fits(pair, value: float) -> None:  # type: ignore[no-untyped-def]
    number = float(pair[1](value).split()[0])
    assert number < 10_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_bytes(4e10), "40 GB"),
        (units.format_bytes(999_960), "1 MB"),
        (units.format_bytes(0), "0 B"),
        (units.format_bandwidth(3.125e9), "25 Gbit/s"),
        (units.format_bandwidth(3e11), "300 GB/s"),
        (units.format_flops(1.5e12), "1.5 TFLOP"),
        (units.format_seconds(0.044), "44 ms"),
        (units.format_seconds(3e-9), "3 ns"),
        (units.format_seconds(43200), "12 h"),
    ],
)
def test_formatting(text: str, expected: str) -> None:
    assert text == expected


@given(st.integers(1, 10**6), st.sampled_from(["ns", "us", "ms", "s"]))
def test_parsing_rounds_once(number: int, unit: str) -> None:
    exponent = {"ns": -9, "us": -6, "ms": -3, "s": 0}[unit]
    assert units.parse_seconds(f"{number} {unit}") == float(f"{number}e{exponent}")


@pytest.mark.parametrize(
    ("text", "parse", "meant"),
    [
        ("1 gbps", units.parse_bandwidth, "Did you mean 1 Gbps?"),
        ("20 Mbit", units.parse_bandwidth, "Did you mean 20 Mbit/s?"),
        ("1 Gb", units.parse_bandwidth, "Did you mean 1 GB/s or 1 Gbit/s?"),
        ("1 GBps", units.parse_bandwidth, "Did you mean 1 GB/s or 1 Gbit/s?"),
        ("40 gb", units.parse_bytes, "Did you mean 40 GB?"),
        ("10 TFLOPS", units.parse_compute, "Did you mean 10 TFLOP/s?"),
        ("5 MS", units.parse_seconds, "Did you mean 5 ms?"),
        ("1 furlong", units.parse_bandwidth, None),
        ("fast", units.parse_bandwidth, None),
    ],
)
def test_units_that_are_spelt_almost_right(text: str, parse: Callable[[str], float], meant: str | None) -> None:
    assert units.close_quantity(text, parse) == meant
