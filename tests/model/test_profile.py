"""Profile files, and what lies between measured points. Nasty files: tests/fuzz/corpus/profile."""

from __future__ import annotations

import hashlib
import json
from itertools import permutations
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.spec import PRECISIONS
from isthmus.errors import ProfileError
from isthmus.model.load_profile import load_profile, profile_digest, save_profile
from isthmus.model.profile import (
    BlockTime,
    CollectiveTime,
    DeviceCosts,
    NetworkCosts,
    Profile,
    along,
)

seconds = st.floats(0.0, 1e6)
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,9}", fullmatch=True)
block_times = st.builds(
    BlockTime,
    block=st.sampled_from(("aa", "bb", "digest of a block")),
    name=st.sampled_from(("", "h.0", "Größe")),
    device=names,
    precision=st.sampled_from(PRECISIONS),
    samples=st.integers(1, 10**9),
    tensor=st.integers(1, 64),
    forward_seconds=seconds,
    backward_seconds=seconds,
)
collective_times = st.builds(
    CollectiveTime,
    how=st.sampled_from(("ring", "tree")),
    hosts=st.lists(names, min_size=2, max_size=4).map(tuple),
    bytes=st.floats(1e-3, 1e18),
    seconds=seconds,
) | st.builds(
    CollectiveTime, how=st.just("server"), hosts=st.just(("a", "b")), bytes=st.floats(1, 9), seconds=seconds, root=names
)
rates = st.none() | st.floats(1e-3, 1e18)
device_costs = st.builds(
    DeviceCosts,
    device=names,
    action_seconds=seconds,
    step_seconds=seconds,
    update_bandwidth=rates,
    add_bandwidth=rates,
    context_bytes=st.none() | st.floats(0.0, 1e18),
    held=st.floats(1.0, 100.0),
    held_recomputed=st.floats(1.0, 100.0),
)
network_costs = st.builds(NetworkCosts, payload=st.floats(1e-3, 1.0), message_seconds=seconds)
profiles = st.builds(
    Profile,
    origin=st.text(st.characters(categories=("L", "N", "P")), max_size=20),
    blocks=st.lists(block_times, max_size=4, unique_by=lambda t: t.samples).map(tuple),
    collectives=st.lists(collective_times, max_size=4, unique_by=lambda t: t.bytes).map(tuple),
    devices=st.lists(device_costs, max_size=3, unique_by=lambda costs: costs.device).map(tuple),
    network=st.none() | network_costs,
)
points = st.dictionaries(st.integers(1, 60), st.floats(0, 100), min_size=2, max_size=5).map(
    lambda found: tuple((float(x), y) for x, y in sorted(found.items()))
)


@settings(max_examples=60)
@given(profiles)
def test_a_profile_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert profile_digest(load_profile(path)) == profile_digest(profile)
    assert json.loads(path.read_text())["kind"] == "profile"


@settings(max_examples=60)
@given(profiles, st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_files_that_share_no_point_are_one(
    tmp_path_factory: pytest.TempPathFactory, profile: Profile, where: list[int]
) -> None:
    """A profile dealt out to three files is the same profile again, whatever the order of the files."""
    folder = tmp_path_factory.mktemp("profiles")
    for number in range(3):
        blocks = (time for time, file in zip(profile.blocks, where, strict=False) if file == number)
        collectives = (time for time, file in zip(profile.collectives, where[4:], strict=False) if file == number)
        devices = (costs for costs, file in zip(profile.devices, where[2:], strict=False) if file == number)
        part = Profile(
            origin=profile.origin,
            blocks=tuple(blocks),
            collectives=tuple(collectives),
            devices=tuple(devices),
            network=profile.network if number == where[0] else None,
        )
        save_profile(part, folder / f"{number}.json")
    paths = [folder / f"{number}.json" for number in range(3)]
    joined = load_profile(*paths)
    assert set(joined.blocks) == set(profile.blocks) and set(joined.collectives) == set(profile.collectives)
    assert joined.origin == profile.origin and joined.block_points == profile.block_points
    assert joined.device_costs == profile.device_costs and joined.network == profile.network
    assert profile_digest(load_profile(*reversed(paths))) == profile_digest(joined)


def test_a_point_of_two_files_is_refused(tmp_path: Path) -> None:
    """Also where both say the same: one of the two was not meant."""
    point = BlockTime(block="aa", device="T4", precision="fp32", samples=2, forward_seconds=1.0, backward_seconds=2.0)
    other = msgspec.structs.replace(point, samples=4)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    save_profile(Profile(blocks=(other, point)), one)
    save_profile(Profile(blocks=(msgspec.structs.replace(point, forward_seconds=7.0),)), two)
    for paths, found in (((one, two), "one.json at blocks[1]"), ((two, one), "two.json at blocks[0]")):
        with pytest.raises(ProfileError) as caught:
            load_profile(*paths)
        assert caught.value.what == "two profiles give the same point"
        assert (caught.value.where or "").startswith(str(paths[1])) and (caught.value.found or "").endswith(found)
    with pytest.raises(ProfileError, match="two profiles give the same point"):
        load_profile(one, one)


def test_without_constants_the_file_is_as_it_was(tmp_path: Path) -> None:
    """So that plans that were made with a profile of then still find it to be the same."""
    save_profile(Profile(origin="then"), tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text()).keys() == {
        "kind",
        "version",
        "origin",
        "blocks",
        "collectives",
    }
    plain = b'{"origin":"then","blocks":[],"collectives":[]}'
    assert profile_digest(Profile(origin="then")) == hashlib.sha256(plain).hexdigest()
    assert profile_digest(Profile(origin="then", network=NetworkCosts())) != profile_digest(Profile(origin="then"))


def test_constants_of_two_files_are_refused(tmp_path: Path) -> None:
    one, two, three = (tmp_path / f"{number}.json" for number in range(3))
    save_profile(Profile(devices=(DeviceCosts(device="T4"),), network=NetworkCosts()), one)
    save_profile(Profile(network=NetworkCosts()), two)
    save_profile(Profile(devices=(DeviceCosts(device="T4", step_seconds=1.0),)), three)
    for other, place in ((two, "network"), (three, "devices[0]")):
        with pytest.raises(ProfileError) as caught:
            load_profile(one, other)
        assert (caught.value.where or "").endswith(place)


@given(points, st.integers(1, 200))
def test_between_points_it_is_straight_and_outside_it_never_falls(
    found: tuple[tuple[float, float], ...], x: int
) -> None:
    xs, ys = (list(column) for column in zip(*found, strict=True))
    value = along(found, x)
    if xs[0] <= x <= xs[-1]:
        assert value == pytest.approx(np.interp(x, xs, ys), rel=1e-12, abs=1e-12)
    elif x < xs[0]:
        assert ys[0] * x / xs[0] * (1 - 1e-12) <= value <= ys[0]
    else:
        assert value >= ys[-1]
    assert value >= 0.0
    assert all(along(found, a) == b for a, b in found)
    if x + 1 <= xs[0] or x >= xs[-1]:
        assert along(found, x + 1) >= value * (1 - 1e-12)


@given(points, st.integers(1, 200))
def test_no_number_of_samples_is_cheaper_than_a_point_or_the_last(
    found: tuple[tuple[float, float], ...], most: int
) -> None:
    """Each sample's part of the time is least where something was measured, or at the most samples."""
    least = min(along(found, x) / x for x in range(1, most + 1))
    ends = [x for x, _ in found if x <= most] + [most]
    assert least >= min(along(found, x) / x for x in ends) * (1 - 1e-9)


def test_straight_lines_by_hand() -> None:
    found = ((2.0, 6.0), (4.0, 8.0), (8.0, 24.0))
    assert [along(found, x) for x in (1, 2, 3, 4, 6, 8, 10)] == [5.0, 6.0, 7.0, 8.0, 16.0, 24.0, 32.0]
    steep = ((4.0, 4.0), (8.0, 24.0))  # the line would be below 0 at 1: in proportion instead
    assert along(steep, 1) == 1.0
    falling = ((4.0, 8.0), (8.0, 4.0))  # a measurement may fall; what lies outside of it may not
    assert [along(falling, x) for x in (1, 6, 100)] == [8.0, 6.0, 4.0]


def test_collectives_are_known_by_their_hosts_and_the_order_that_matters() -> None:
    one = CollectiveTime(how="ring", hosts=("a", "b", "a"), bytes=100.0, seconds=2.0)
    profile = Profile(collectives=(one,))
    assert profile.collective("ring", ("b", "a", "a"), None, 100.0) == (2.0, True)
    assert profile.collective("ring", ("a", "a", "b"), None, 300.0) == (6.0, False)
    assert profile.collective("ring", ("a", "b", "a"), None, 1.0) == (2.0, False)
    assert profile.collective("ring", ("a", "b"), None, 100.0) is None
    four = {how: CollectiveTime(how=how, hosts=tuple("abcd"), bytes=1.0, seconds=1.0) for how in ("ring", "tree")}
    other = Profile(collectives=tuple(four.values()))
    known = {hosts: {how for how in four if other.collective(how, hosts, None, 1.0)} for hosts in permutations("abcd")}
    around = {way[i:] + way[:i] for way in ("abcd", "dcba") for i in range(4)}
    assert {"".join(hosts) for hosts, hows in known.items() if "ring" in hows} == around
    assert [hosts for hosts, hows in known.items() if "tree" in hows] == [tuple("abcd")]
    assert profile.collective("tree", ("a", "b", "a"), None, 100.0) is None
    more = Profile(collectives=(one, CollectiveTime(how="ring", hosts=("b", "a", "a"), bytes=200.0, seconds=3.0)))
    assert more.collective("ring", ("a", "a", "b"), None, 150.0) == (2.5, False)
    assert more.collective("ring", ("a", "a", "b"), None, 400.0) == (5.0, False)


def test_errors_say_where_and_what(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    point = {
        "block": "b", "device": "T4", "precision": "fp32", "samples": 0, "forward_seconds": 1, "backward_seconds": 1
    }  # fmt: skip
    path.write_text(json.dumps({"kind": "profile", "version": 1, "blocks": [point]}))
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    assert str(caught.value) == (
        f"{path} at blocks[0].samples: blocks[0].samples has an impossible value. Found 0. Expected 1 to 1000000000."
    )
