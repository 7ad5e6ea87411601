"""A cluster acted out: how slow each device is, and what a profile of one core says of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.cluster.load import load_cluster, parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.emulate.act import Emulation, as_emulated, paces
from isthmus.model.profile import BlockTime, DeviceCosts, Profile
from tests.conftest import ROOT

DEMO = load_cluster(ROOT / "examples" / "clusters" / "demo.yaml")


def cluster(rates: list[int], counts: list[int]) -> Cluster:
    kinds = ", ".join(
        f"k{i}: {{compute: {rate} GFLOP/s, memory: 1 GB, memory_bandwidth: 1 GB/s}}" for i, rate in enumerate(rates)
    )
    hosts = ", ".join(f"h{i}: {{region: r, devices: {{k{i}: {count}}}}}" for i, count in enumerate(counts))
    links = "[{between: [r, r], bandwidth: 1 Gbit/s, latency: 1 ms}]"
    return parse_cluster(
        f"{{kind: cluster, version: 1, name: c, devices: {{{kinds}}}, hosts: {{{hosts}}}, links: {links}}}"
    )


def test_the_demo_computes_one_core_in_all() -> None:
    """40 + 10 + 40 + 10 GFLOP/s: the quick ones at 1 / 2.5 of a core, the slow ones at a quarter of that."""
    assert paces(DEMO) == {"quick": pytest.approx(2.5), "slow": pytest.approx(10.0)}


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 8)), min_size=1, max_size=5),
    st.floats(0.25, 64.0),
)
def test_proportions_are_kept_and_cores_not_exceeded(kinds: list[tuple[int, int]], cores: float) -> None:
    rates, counts = [rate for rate, _ in kinds], [count for _, count in kinds]
    found = paces(cluster(rates, counts), cores)
    speeds = [1.0 / found[f"k{i}"] for i in range(len(rates))]
    assert all(speed * rates[0] == pytest.approx(speeds[0] * rate) for speed, rate in zip(speeds, rates, strict=True))
    together = sum(speed * count for speed, count in zip(speeds, counts, strict=True))
    assert together <= cores * (1 + 1e-9) or max(speeds) == pytest.approx(1.0)
    assert max(speeds) <= 1.0 + 1e-9
    assert together == pytest.approx(cores) or max(speeds) == pytest.approx(1.0)  # and none is slower than it must be


def test_a_profile_of_a_core_slows_down_with_the_devices() -> None:
    block = BlockTime(block="b", device="CPU", precision="fp32", samples=2, forward_seconds=0.1, backward_seconds=0.3)
    own = DeviceCosts(
        device="CPU", action_seconds=0.01, step_seconds=0.02, update_bandwidth=1e9, add_bandwidth=2e9, context_bytes=3e8
    )
    found = as_emulated(Profile(blocks=(block,), devices=(own,)), {"quick": 2.0, "slow": 10.0})
    assert [(time.device, time.forward_seconds, time.backward_seconds) for time in found.blocks] == [
        ("quick", 0.2, 0.6),
        ("slow", 1.0, 3.0),
    ]
    slow = found.device_costs["slow"]
    assert (slow.action_seconds, slow.step_seconds, slow.update_bandwidth) == pytest.approx((0.1, 0.2, 1e8))
    assert (slow.add_bandwidth, slow.context_bytes) == (2e9, 3e8)  # done by other threads; memory is what it is


def test_an_emulation_says_where_devices_run() -> None:
    with Emulation(DEMO, ["oslo1", "lima2"]) as emulation:
        assert emulation.slower("oslo1/quick/0") == pytest.approx(2.5)
        assert "1/2.5 to 1/10 of a core" in emulation.describe()
        assert emulation.command("lima2/slow/0", ["true"])[-1] == "true"
        assert bool(emulation.interface) == emulation.world.shaped
