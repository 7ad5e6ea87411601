"""The catalog against what the hardware's own numbers give: clocks, units, bus widths."""

from pathlib import Path

import pytest

from isthmus.cluster.catalog import CATALOG
from isthmus.cluster.spec import PRECISIONS

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
    "P40": (3840, 1.531),
    "A30": (3584, 1.440),
    "L40": (18176, 2.490),
    "L40S": (18176, 2.520),
    "RTX-8000": (4608, 1.770),
    "RTX-A4000": (6144, 1.560),
    "RTX-A6000": (10752, 1.800),
    "RTX-6000-Ada": (18176, 2.505),
    "GTX-1080": (2560, 1.733),
    "TITAN-RTX": (4608, 1.770),
    "RTX-3080": (8704, 1.710),
    "RTX-4080": (9728, 2.505),
    "RTX-5090": (21760, 2.407),
    "MI100": (120 * 128, 1.502),  # AMD: matrix units, by compute unit
    "MI210": (104 * 128, 1.700),
    "MI250X": (110 * 128, 1.700),
    "MI300X": (304 * 128, 2.100),
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
    "P40": (384, 7.2),
    "A30": (3072, 2.43),
    "A100-80GB": (5120, 3.186),
    "H200": (6144, 6.25),
    "GH200": (6144, 5.2),
    "L40": (384, 18.0),
    "L40S": (384, 18.0),
    "RTX-8000": (384, 14.0),
    "RTX-A4000": (256, 14.0),
    "RTX-A6000": (384, 16.0),
    "RTX-6000-Ada": (384, 20.0),
    "GTX-1080": (256, 10.0),
    "TITAN-RTX": (384, 14.0),
    "RTX-3080": (320, 19.0),
    "RTX-4080": (256, 22.4),
    "RTX-5090": (512, 28.0),
    "MI100": (4096, 2.4),
    "MI210": (4096, 3.2),
    "MI250X": (4096, 3.2),
    "MI300X": (8192, 5.2),
}

# fp16 operations of a multiprocessor a cycle with fp32 accumulation, over its fp32 ones: 1024 or 512 over 128 (Turing)
# or 256 (since Ampere), 2048 over 128 (A100). A figure with sparsity, or with fp16 accumulation, would be twice that.
TENSOR = {
    8: ["V100-16GB", "V100-32GB", "T4", "RTX-8000", "TITAN-RTX"],
    16: ["A30", "A100-40GB", "A100-80GB", "A100-80GB-PCIe"],
    4: ["RTX-2080Ti", "A10", "A40", "L4", "L40S", "RTX-A4000", "RTX-A5000", "RTX-A6000", "RTX-6000-Ada"],
    2: ["RTX-3080", "RTX-3090", "RTX-4080", "RTX-4090", "RTX-5090", "L40", "P100"],
    1 / 64: ["P40", "GTX-1080", "GTX-1080Ti", "TITAN-Xp"],
}


def test_it_has_the_named_kinds_under_their_names() -> None:
    assert len(CATALOG) >= 25 and {*NAMED, "B200"} <= set(CATALOG)
    assert all(kind.name == name for name, kind in CATALOG.items())


def test_the_page_about_clusters_lists_them_all(root: Path) -> None:
    page = (root / "docs" / "clusters.md").read_text("utf-8")
    for name, kind in CATALOG.items():
        rates = [kind.compute.get(precision) for precision in PRECISIONS]
        rest = [figure / 1e9 for figure in (kind.memory, kind.memory_bandwidth, kind.bus, kind.peer)]
        cells = ["–" if rate is None else f"{rate / 1e12:.4g}" for rate in rates] + [f"{figure:.4g}" for figure in rest]
        assert f"| `{name}` | {' | '.join(cells)} |" in page


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
    pascal = {"P100", "P40", "GTX-1080", "GTX-1080Ti", "TITAN-Xp"}
    pascal_volta_turing = pascal | {"V100-16GB", "V100-32GB", "T4", "RTX-2080Ti", "RTX-8000", "TITAN-RTX"}
    assert without_bf16 == pascal_volta_turing | {"CPU"}
    slower_in_fp16 = {name for name, kind in CATALOG.items() if kind.compute.get("fp16", 1e99) < kind.compute["fp32"]}
    assert slower_in_fp16 == pascal - {"P100"}
    for kind in CATALOG.values():
        if "bf16" in kind.compute:
            assert kind.compute["bf16"] == kind.compute["fp16"] / (2 if kind.name == "MI100" else 1)


@pytest.mark.parametrize(("ratio", "name"), [(ratio, name) for ratio, names in TENSOR.items() for name in names])
def test_tensor_rates_are_dense_with_fp32_accumulation(ratio: float, name: str) -> None:
    rates = CATALOG[name].compute
    assert rates["fp16"] / rates["fp32"] == pytest.approx(ratio, rel=0.02)


def test_figures_are_of_one_world() -> None:
    for name, kind in CATALOG.items():
        assert 1e9 < kind.bus <= kind.memory_bandwidth and 1e9 < kind.peer < kind.memory_bandwidth, name
        # a figure with sparsity would break this for the H100 family (14.8); the B200 has 28
        assert kind.compute.get("fp16", 0.0) <= (28.2 if name == "B200" else 16.1) * kind.compute["fp32"], name
        if name.endswith("GB"):
            assert kind.memory == int(name.split("-")[-1][:-2]) * 1e9
