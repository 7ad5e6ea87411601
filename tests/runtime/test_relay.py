"""Channels over relays: what one end sends is what the other gets, in order, whatever the others do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.plan.relays import joined, relays
from isthmus.plan.types import Via
from isthmus.runtime.comm.channel import Channel, ChannelError, Channels
from isthmus.runtime.comm.relay import pass_on
from tests.runtime.threads import at_once

ENDS = ("a/cpu/0", "z/cpu/0")
_Message = tuple[int, Tensor]  # tag


@contextmanager
def row(path: tuple[str, ...]) -> Iterator[dict[str, Channels]]:
    """Networks of workers in a row, the first and the last of which talk over the others."""
    store, between = HashStore(), path[1:-1]
    ways: dict[str, Any] = {path[0]: {path[-1]: between}, path[-1]: {path[0]: between[::-1]}}
    made = {name: Channels(store, name, ways=ways.get(name)) for name in path}
    for at, name in enumerate(path):
        carries = (path[at - 1], path[at + 1]) if name in between else ()
        pass_on(made[name], (way[0] for way in ways.get(name, {}).values()), carries)
    try:
        yield made
    finally:
        at_once([network.close for network in made.values()])


def talk(channel: Channel, sends: list[_Message], receives: list[_Message]) -> list[Tensor]:
    """Posts all receives, then all sends; what came, in the order of the receives."""
    into = [torch.empty_like(tensor) for _, tensor in receives]
    coming = [channel.receive(tensor, tag) for tensor, (tag, _) in zip(into, receives, strict=True)]
    for work in [channel.send(tensor, tag) for tag, tensor in sends]:
        work.wait()
    for work in coming:
        work.wait()
    return into


def mixed(messages: list[_Message], source: random.Random) -> list[_Message]:
    """In another order, in which those of one tag follow each other as before."""
    order = [tag for tag, _ in messages]
    source.shuffle(order)
    queues = {tag: iter([tensor for own, tensor in messages if own == tag]) for tag in order}
    return [(tag, next(queues[tag])) for tag in order]


@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 30))
@settings(max_examples=10, deadline=None)
def test_everything_arrives_whole_and_in_the_order_of_its_tag(seed: int, between: int, count: int) -> None:
    note(f"seed {seed}")
    source = random.Random(seed)
    path = (ENDS[0], *(f"{name}/cpu/0" for name in source.sample("mbyx", between)), ENDS[1])
    ways = [[(source.randrange(3), torch.randn(source.choice((0, 1, 7, 100_000)))) for _ in range(count)] for _ in ENDS]
    with row(path) as made:
        channels = [made[end].channel("talk", other) for end, other in (ENDS, ENDS[::-1])]
        asked = [mixed(ways[1], source), mixed(ways[0], source)]
        got = at_once([lambda i=i: talk(channels[i], ways[i], asked[i]) for i in (0, 1)])  # type: ignore[misc]
        for tensors, expected in zip(got, asked, strict=True):
            assert all(torch.equal(a, b) for a, (_, b) in zip(tensors, expected, strict=True))
        assert channels[0].round_trip == channels[1].round_trip > 0.0
        joints = {frozenset((channel.me, channel.near)) for network in made.values() for channel in network.channels}
        assert joints == {frozenset(pair) for pair in pairwise(path)}, "only neighbours connect"


def test_more_tags_than_are_remembered_or_passed_on_at_once() -> None:
    """All asked for before anything is sent, on two channels over the same relay."""
    messages = [(tag, torch.full((3,), float(tag))) for tag in range(200)]
    with row((ENDS[0], "m/cpu/0", ENDS[1])) as made:
        for name in ("one", "other"):
            channels = [made[end].channel(name, other) for end, other in (ENDS, ENDS[::-1])]
            got = at_once([lambda c=c: talk(c, messages, messages) for c in channels])  # type: ignore[misc]
            assert all(torch.equal(a, b) for came in got for a, (_, b) in zip(came, messages, strict=True))


@pytest.mark.parametrize("who", ["m/cpu/0", "n/cpu/0", ENDS[1]])
def test_when_a_relay_or_the_other_end_goes_an_end_hears_of_it(who: str) -> None:
    with row((ENDS[0], "m/cpu/0", "n/cpu/0", ENDS[1])) as made:
        channels = {end: made[end].channel("talk", other) for end, other in (ENDS, ENDS[::-1])}
        waiting = [channels[end].receive(torch.zeros(4), 0) for end in ENDS if end != who]
        at_once([channel.connected for channel in channels.values()])
        made[who].close()
        for work in waiting:
            with pytest.raises(ChannelError, match=r"lost the channel to ./cpu/0 over"):
                at_once([work.wait])


ROW = """
kind: cluster
version: 1
name: row
hosts:
  a: {region: ra, devices: {T4: 1}}
  b: {region: rb, devices: {T4: 1}, nic: 80 Mbit/s}
  c: {region: rc, devices: {T4: 1}}
  d: {region: rd, devices: {T4: 1}}
  bare: {region: re, devices: {}}
links:
  - {between: [ra, rb], bandwidth: 1 Gbit/s, latency: 1 ms}
  - {between: [rb, rd], bandwidth: 1 Gbit/s, latency: 1 ms}
  - {between: [ra, rc], bandwidth: 400 Mbit/s, latency: 30 ms}
  - {between: [rc, rd], bandwidth: 200 Mbit/s, latency: 20 ms}
  - {between: [ra, re], bandwidth: 10 Gbit/s, latency: 1 us}
  - {between: [re, rd], bandwidth: 10 Gbit/s, latency: 1 us}
"""


def cluster(text: str = ROW) -> Cluster:
    return parse_cluster(text)


def test_the_path_on_which_a_megabyte_is_passed_on_soonest() -> None:
    """a to d: over b 2 (1 ms + 100 ms of its nic), over c 50 ms + 20 ms + 40 ms; `bare` has no worker."""
    assert relays(cluster()) == (
        Via(between=("a", "d"), hosts=("c",)),
        Via(between=("b", "c"), hosts=("a",)),
    )
    fast = cluster(ROW.replace(", nic: 80 Mbit/s", ""))
    assert relays(fast)[0] == Via(between=("a", "d"), hosts=("b",))


def test_a_relayed_pair_has_the_link_of_its_narrowest_hop_and_of_all_latencies() -> None:
    whole = joined(cluster(), relays(cluster()))
    far = whole.link("a", "d")
    assert far is not None and (far.bandwidth, far.latency) == (25e6, pytest.approx(0.05))
    slow = whole.link("b", "c")
    assert slow is not None and (slow.bandwidth, slow.latency) == (10e6, pytest.approx(0.031))
    assert whole.link("a", "b") == cluster().link("a", "b")
    lost = ROW.replace("[rc, rd]", "[rc, re]").replace("[rb, rd]", "[rb, re]")
    assert ("a", "d") not in [via.between for via in relays(cluster(lost))], "there is no way"
