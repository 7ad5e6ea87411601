"""The catalog against what the hardware's own numbers give: clocks, units, bus widths."""

import pytest

from isthmus.cluster.catalog import CATALOG

NAMED = [
    "A100-40GB",
    "A100-80GB",
    "H100-SXM",
    "H100-PCIe",
    "H200",
    "V100-16GB",
    "V100-32GB",
    "P100",
    "T4",
    "L4",
    "A10",
    "A40",
    "RTX-A5000",
    "GTX-1080Ti",
    "TITAN-Xp",
    "RTX-2080Ti",
    "RTX-3090",
    "RTX-4090",
    "MI300X",
    "CPU",
]

# fp32 lanes, boost clock in GHz: two FLOP a lane and cycle
LANES = {
    "A100-40GB": (6912, 1.410),
    "H100-SXM": (16896, 1.980),
    "H100-PCIe": (14592, 1.755),
    "V100-16GB": (5120, 1.530),
    "P100": (3584, 1.303),
    "T4": (2560, 1.590),
    "L4": (7424, 2.040),
    "A10": (9216, 1.695),
    "A40": (10752, 1.740),
    "RTX-A5000": (8192, 1.695),
    "GTX-1080Ti": (3584, 1.582),
    "TITAN-Xp": (3840, 1.582),
    "RTX-2080Ti": (4352, 1.545),
    "RTX-3090": (10496, 1.695),
    "RTX-4090": (16384, 2.520),
}

# memory bus in bits, Gbit/s a pin
PINS = {
    "A100-40GB": (5120, 2.43),
    "H100-SXM": (5120, 5.23),
    "V100-16GB": (4096, 1.75),
    "P100": (4096, 1.43),
    "L4": (192, 12.5),
    "A10": (384, 12.5),
    "A40": (384, 14.5),
    "RTX-A5000": (384, 16.0),
    "GTX-1080Ti": (352, 11.0),
    "TITAN-Xp": (384, 11.4),
    "RTX-2080Ti": (352, 14.0),
    "RTX-3090": (384, 19.5),
    "RTX-4090": (384, 21.0),
}


def test_it_has_the_named_kinds_under_their_names() -> None:
    assert sorted(CATALOG) == sorted(NAMED)
    assert all(kind.name == name for name, kind in CATALOG.items())


@pytest.mark.parametrize("name", LANES)
def test_fp32_is_lanes_times_clock(name: str) -> None:
    lanes, clock = LANES[name]
    assert CATALOG[name].compute["fp32"] == pytest.approx(2 * lanes * clock * 1e9, rel=0.01)


@pytest.mark.parametrize("name", PINS)
def test_memory_bandwidth_is_pins_times_rate(name: str) -> None:
    pins, rate = PINS[name]
    assert CATALOG[name].memory_bandwidth == pytest.approx(pins * rate * 1e9 / 8, rel=0.01)


def test_precisions_are_those_of_the_generation() -> None:
    without_bf16 = {name for name, kind in CATALOG.items() if "bf16" not in kind.compute}
    pascal_volta_turing = {"V100-16GB", "V100-32GB", "P100", "T4", "GTX-1080Ti", "TITAN-Xp", "RTX-2080Ti"}
    assert without_bf16 == pascal_volta_turing | {"CPU"}
    slower_in_fp16 = {name for name, kind in CATALOG.items() if kind.compute.get("fp16", 1e99) < kind.compute["fp32"]}
    assert slower_in_fp16 == {"GTX-1080Ti", "TITAN-Xp"}
    for kind in CATALOG.values():
        if "bf16" in kind.compute:
            assert kind.compute["bf16"] == kind.compute["fp16"]


def test_figures_are_of_one_world() -> None:
    for name, kind in CATALOG.items():
        assert 1e9 < kind.bus <= kind.memory_bandwidth and 1e9 < kind.peer < kind.memory_bandwidth, name
        # a dense tensor rate is 2 to 16 times the fp32 rate; a figure with sparsity would break this for A100 and H100
        assert kind.compute.get("fp16", 0.0) <= 16.1 * kind.compute["fp32"], name
        if name.endswith("GB"):
            assert kind.memory == int(name.split("-")[-1][:-2]) * 1e9
