"""Syncs over real Gloo pairs against plain sums, on one to five workers; and channels that break."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import FileStore, HashStore, Store, TCPStore

from isthmus.model.job import Job
from isthmus.plan import ring
from isthmus.runtime.comm import scratch, syncs
from isthmus.runtime.comm.channel import ChannelError, Channels
from isthmus.runtime.comm.syncs import Ring, SyncMethod, make_sync, piece_bounds
from isthmus.runtime.program import BucketSpec
from tests.quiet import PATIENCE
from tests.runtime.threads import at_once, networks

NAMES = [f"h{i}/cpu/0" for i in range(5)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class World:
    """Five workers whose channels serve all examples."""

    def __init__(self) -> None:
        self.networks = networks(NAMES)
        self.made: dict[Any, list[SyncMethod]] = {}

    def syncs(
        self, how: str, count: int, segments: int = 1, regions: tuple[int, ...] = (), root: int | None = None
    ) -> list[SyncMethod]:
        key = (how, count, segments, regions, root)
        if key not in self.made:
            members = tuple(NAMES[:count])
            spec = BucketSpec(
                name="b",
                number=len(self.made),
                how=how,  # type: ignore[arg-type]
                parameters=(),
                members=members,
                regions=tuple(f"r{r}" for r in (regions or (0,) * count)),
                root=None if root is None else NAMES[root],
                segments=segments,
                layout="sharded-optimizer",
            )
            job = Job(name="job", model="zoo:mlp-tiny", batch=1)
            everyone = members if root is None or root < count else (*members, NAMES[root])
            made = [
                make_sync(spec, SimpleNamespace(device=name, job=job), self.networks[name])  # type: ignore[arg-type]
                for name in everyone
            ]
            self.made[key] = [sync for sync in made if sync is not None]
        return self.made[key]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    for network in made.networks.values():
        network.close()


def parts_of(count: int, size: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(count)]


def close_to_sum(found: Tensor, parts: list[Tensor]) -> None:
    exact = torch.stack([part.double() for part in parts]).sum(0)
    size = torch.stack([part.double().abs() for part in parts]).sum(0)
    rounding = torch.finfo(found.dtype).eps * len(parts)
    assert ((found.double() - exact).abs() <= rounding * size + 1e-300).all()


def check_all_reduce(made: list[SyncMethod], parts: list[Tensor]) -> None:
    flats = [part.clone() for part in parts]
    flats += [torch.full_like(parts[0], torch.nan)] * (len(made) - len(flats))  # a root that takes no part
    at_once([lambda s=s, f=f: s.all_reduce(f) for s, f in zip(made, flats, strict=True)])
    for flat in flats:
        assert torch.equal(flat, flats[0])
    close_to_sum(flats[0], parts)


sizes = st.one_of(st.integers(0, 12), st.integers(0, 30_000))
cases = st.fixed_dictionaries(
    {"size": sizes, "dtype": st.sampled_from(DTYPES), "seed": st.integers(0, 9), "segments": st.sampled_from([1, 2, 7])}
)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything happens at sizes that are quick to test."""
    for name, value in {"LARGEST": 4096, "WORTHY": 1024, "SMALLEST": 64, "SHORT": 256, "SCRATCH": 16384}.items():
        monkeypatch.setattr(ring, name, value)
    monkeypatch.setattr(scratch, "_spare", [])


quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(case=cases, count=st.integers(1, 5))
def test_ring_sums(world: World, small_segments: None, case: dict[str, Any], count: int) -> None:
    made = world.syncs("ring", count, case["segments"])
    check_all_reduce(made, parts_of(count, case["size"], case["dtype"], case["seed"]))


@quick
@given(case=cases, count=st.integers(1, 5))
def test_the_halves_of_a_ring(world: World, small_segments: None, case: dict[str, Any], count: int) -> None:
    """After the first half everybody has the sum of its piece; the second gives everybody all of them."""
    made = world.syncs("ring", count, case["segments"])
    parts = parts_of(count, case["size"], case["dtype"], case["seed"])
    flats = [part.clone() for part in parts]
    at_once([lambda s=s, f=f: s.reduce_scatter(f) for s, f in zip(made, flats, strict=True)])
    pieces = [slice(*piece_bounds(case["size"], count, i)) for i in range(count)]
    for flat, piece in zip(flats, pieces, strict=True):
        close_to_sum(flat[piece], [part[piece] for part in parts])
    whole = torch.cat([flat[piece] for flat, piece in zip(flats, pieces, strict=True)])
    at_once([lambda s=s, f=f: s.all_gather(f) for s, f in zip(made, flats, strict=True)])
    for flat in flats:
        assert torch.equal(flat, whole)


@quick
@given(
    case=cases, regions=st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0), (1, 0, 0, 1, 0), (0, 1, 2, 1, 1)])
)
def test_tree_sums(world: World, small_segments: None, case: dict[str, Any], regions: tuple[int, ...]) -> None:
    made = world.syncs("tree", len(regions), case["segments"], regions)
    check_all_reduce(made, parts_of(len(regions), case["size"], case["dtype"], case["seed"]))


@quick
@given(case=cases, shape=st.sampled_from([(1, 0), (1, 4), (2, 1), (3, 0), (3, 4), (4, 4), (5, 2)]))
def test_server_sums(world: World, small_segments: None, case: dict[str, Any], shape: tuple[int, int]) -> None:
    """The root is a participant, or a device that takes no part otherwise."""
    count, root = shape
    made = world.syncs("server", count, case["segments"], root=root)
    check_all_reduce(made, parts_of(count, case["size"], case["dtype"], case["seed"]))


@pytest.mark.parametrize("how", ["ring", "tree", "server"])
def test_large_tensors(world: World, how: str) -> None:
    """Real segment sizes, with more of them than there is scratch memory for."""
    made = world.syncs(how, 3, 1, (0, 1, 0), root=1 if how == "server" else None)
    check_all_reduce(made, parts_of(3, 2_500_001, torch.float32))


@pytest.mark.parametrize("how", ["tree", "server"])
def test_new_weights_go_around_however_the_gradient_came(world: World, how: str) -> None:
    made = world.syncs(how, 3, 1, (0, 1, 0), root=1 if how == "server" else None)
    parts = parts_of(3, 1000, torch.float32)
    whole = torch.cat([part[slice(*piece_bounds(1000, 3, i))] for i, part in enumerate(parts)])
    at_once([lambda s=s, f=f: s.all_gather(f) for s, f in zip(made, parts, strict=True)])
    assert all(torch.equal(part, whole) for part in parts)


def test_two_far_apart_swap(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "FAR", -1.0)
    check_all_reduce(world.syncs("ring", 2), parts_of(2, 1_000_001, torch.float32))


def test_sums_that_overflow(world: World) -> None:
    flats = [torch.full((100_000,), big) for big in (3e38, 3e38, torch.inf)]
    made = world.syncs("ring", 3)
    at_once([lambda s=s, f=f: s.all_reduce(f) for s, f in zip(made, flats, strict=True)])
    assert all(flat.isinf().all() for flat in flats)


@pytest.mark.parametrize("room", [0, 1 << 20, None])
def test_syncs_overlap(world: World, monkeypatch: pytest.MonkeyPatch, room: int | None) -> None:
    """Several syncs of the same workers at once, begun in another order by each; they share little scratch or much.

    For what one worker sends: what may be on its way, and a segment of each sync.
    """
    monkeypatch.setattr(ring, "FAST", 0.0)
    if room is not None:
        monkeypatch.setattr(ring, "SCRATCH", room)
    most, borrow, before = 0, syncs._borrow, dict(syncs._lent)  # runs that were broken off here may have left some

    def watched(*given: Any, **more: Any) -> Tensor | None:
        nonlocal most
        slot = borrow(*given, **more)
        most = max(most, *syncs._lent.values())
        return slot

    monkeypatch.setattr(syncs, "_borrow", watched)
    made = [world.syncs("ring", 3, 1), world.syncs("ring", 3, 2), world.syncs("tree", 3, 1, (0, 1, 0))]
    parts = [parts_of(3, 200_000, torch.float32, seed) for seed in range(3)]
    flats = [[part.clone() for part in some] for some in parts]
    work = [(k, i) for i in range(3) for k in random.Random(i).sample(range(3), 3)]
    at_once([lambda k=k, i=i: made[k][i].all_reduce(flats[k][i]) for k, i in work])
    for some, found in zip(parts, flats, strict=True):
        assert all(torch.equal(flat, found[0]) for flat in found)
        close_to_sum(found[0], some)
    assert most <= ring.SCRATCH + len(made) * 2 * ring.LARGEST  # a slot may be twice as large as it must
    assert {pair: size for pair, size in syncs._lent.items() if size != before.get(pair, 0)} == {}


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [(10, 3, [(0, 3), (3, 6), (6, 10)]), (1, 3, [(0, 0), (0, 0), (0, 1)]), (0, 1, [(0, 0)])],
)
def test_pieces(total: int, count: int, expected: list[tuple[int, int]]) -> None:
    assert [piece_bounds(total, count, i) for i in range(count)] == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("how", ["ring", "tree", "server"])
def test_tensors_on_a_device(world: World, how: str) -> None:
    """Staged through host memory: all workers share one device."""
    made = world.syncs(how, 3, 2, (0, 1, 0), root=1 if how == "server" else None)
    check_all_reduce(made, [part.cuda() for part in parts_of(3, 2_500_001, torch.float32)])


# -- channels


@pytest.mark.parametrize("kind", ["hash", "tcp", "file"])
def test_channels_in_any_order(kind: str, tmp_path: Path) -> None:
    """60 channels between six workers, each making them in an order of its own."""
    names = [f"d{i}" for i in range(6)]
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    shared = HashStore()
    clients: dict[str, Callable[[], Store]] = {
        "hash": lambda: shared,
        "tcp": lambda: TCPStore("127.0.0.1", server.port, wait_for_workers=False),
        "file": lambda: FileStore(str(tmp_path / "store")),
    }
    made: dict[str, Channels] = {}

    def make(me: str) -> None:
        made[me] = Channels(clients[kind](), me)
        wanted = [(f"c{k}", other) for k in range(4) for other in names if other != me]
        random.Random(me).shuffle(wanted)
        for channel in [made[me].channel(*one) for one in wanted]:
            channel.connected()

    begin = time.perf_counter()
    at_once([lambda me=me: make(me) for me in names])
    assert time.perf_counter() - begin < PATIENCE  # 0.1 s on an idle machine
    into = torch.zeros(3)
    coming = made["d1"].channel("c2", "d0").receive(into, 7)
    made["d0"].channel("c2", "d1").send(torch.arange(3.0), 7).wait()
    coming.wait()
    assert into.tolist() == [0, 1, 2]
    for network in made.values():
        network.close()


def test_a_closed_peer_raises() -> None:
    a, b = networks(["a", "b"]).values()
    here, there = a.channel("c", "b"), b.channel("c", "a")
    found: list[ChannelError] = []

    def wait() -> None:
        with pytest.raises(ChannelError) as raised:
            there.receive(torch.zeros(1), 0).wait()
        found.append(raised.value)

    thread = threading.Thread(target=wait)
    thread.start()
    here.connected()
    a.close()
    thread.join(PATIENCE)
    assert "b, channel 'c': lost the channel to a." in str(found[0])
    with pytest.raises(ChannelError, match="closed here"):
        here.send(torch.zeros(1), 0)
    with pytest.raises(ChannelError, match="lost the channel to a"):
        there.send(torch.zeros(1), 0).wait()
    b.close()


def test_closing_wakes_those_who_wait_here() -> None:
    a, b = networks(["a", "b"]).values()
    b.channel("c", "a")
    here, lonely = a.channel("c", "b"), a.channel("nobody comes", "b")

    def wait() -> None:
        with pytest.raises(ChannelError, match="closed here"):
            here.receive(torch.zeros(1), 0).wait()

    def connect() -> None:
        with pytest.raises(ChannelError, match="closed here"):
            lonely.connected()

    def close() -> None:
        here.connected()
        time.sleep(0.05)
        a.close()

    at_once([wait, connect, close], seconds=PATIENCE)
    with pytest.raises(ChannelError, match="closed"):
        a.channel("new", "b")
    b.close()


def test_a_ring_with_a_dead_member_ends() -> None:
    names = ["a", "b", "c"]
    made = networks(names)
    rings = [
        Ring(made[n].channel("r", names[i - 1]), made[n].channel("r", names[(i + 1) % 3]), i, 3)
        for i, n in enumerate(names)
    ]

    def reduce(i: int) -> None:
        with pytest.raises(ChannelError):
            rings[i].all_reduce(torch.zeros(100_000))
        made[names[i]].close()  # as a worker that ends does

    def die() -> None:
        made["c"].connect()
        time.sleep(0.05)
        made["c"].close()

    at_once([lambda: reduce(0), lambda: reduce(1), die], seconds=PATIENCE)


def test_round_trip_is_the_same_number_on_both_sides() -> None:
    a, b = networks(["a", "b"]).values()
    here, there = a.channel("c", "b"), b.channel("c", "a")
    here.connected()
    there.connected()
    assert 0 < here.round_trip == there.round_trip < 1
    with pytest.raises(ChannelError, match="no channel to itself"):
        a.channel("c", "a")
    a.close()
    b.close()
