"""Writes the random case files of the planner beside itself; the same ones every time.

    python benchmarks/cases/planner/make.py

Drawn like clusters that people have, without a look at how any planner does on them. A case is a cluster file and the
job of the same name in `jobs.yaml` of its folder:

    unequal   30   3-24 devices of 2-5 kinds on hosts of unequal size in 1-3 regions; nics 1-100 Gbit/s; between regions
                   100 Mbit/s-10 Gbit/s, up to 100 ms; batches 4-4,096, a decade each in turn
    geo       10   2-6 regions of 1-8 devices; between them 10 Mbit/s-10 Gbit/s, 1-300 ms; every second case lacks links
                   between some pairs, the others have trunks; batches 4-4,096
    small     62   6 devices (every tenth case 7 or 8) of 3 kinds in 2 regions, batches 8-64; in every third case some
                   devices cannot hold the model's state. Models are captured in 8 blocks (see `_planner_cases`)
    held      24   what the network of the planner `learned` never sees in training: other families of models, on stars
                   (one region reaches all others) and chains (each region reaches the next) of 3-6 regions

A family of models is drawn (vision, encoders, GPT), then one of it whose state (16 bytes a parameter: Adam) is at most
0.4 of all devices' memory, 0.5 in `small`. Half of the jobs compute in fp32, half in 16 bits: bf16 where every kind has
it, else fp16, and kinds slow in it compute in fp32. Regions lie on a map so many milliseconds across; a link takes 1 to
1.5 times the straight line. Only `Random.random` is drawn from: the same numbers in every version of Python.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from isthmus.cluster.catalog import CATALOG

FOLDER = Path(__file__).resolve().parent
SEEDS = {"unequal": 6100, "geo": 6200, "small": 6300, "held": 6700}  # a case's seed: its group's and its number, from 1
COUNTS = {"unequal": 30, "geo": 10, "small": 62, "held": 24}

SERVER = (
    "A100-40GB", "A100-80GB", "A10", "A40", "H100-PCIe", "L4", "L40S", "P100", "T4", "V100-16GB", "V100-32GB",
)  # fmt: skip
DESK = (
    "GTX-1080Ti", "RTX-2080Ti", "RTX-3080", "RTX-3090", "RTX-4080", "RTX-4090", "RTX-A4000", "RTX-A5000", "TITAN-Xp",
)  # fmt: skip
LITTLE = ("GTX-1080", "GTX-1080Ti", "RTX-2080Ti", "RTX-3080", "TITAN-Xp")  # 8 to 12 GB
REGIONS = ("ash", "birch", "cedar", "elm", "fir", "oak")
BATCHES = ((4, 6, 8, 12, 16, 24, 32), (40, 48, 64, 96, 128, 192, 256), (400, 512, 768, 1024, 1536, 2048, 4096))
SMALL_BATCHES = (8, 12, 16, 24, 32, 48, 64)

T = TypeVar("T")


class Model(NamedTuple):
    """A model of the zoo: millions of parameters, and the sequences that are drawn from."""

    name: str
    millions: float
    sequences: tuple[int, ...] = ()


FAMILIES = (
    (
        Model("inception-v3", 23.8), Model("resnet101", 44.5), Model("wideresnet101", 126.9), Model("vgg19", 143.7),
        Model("vit-large", 304.3),
    ),
    (
        Model("transformer", 63.0, (64, 256)), Model("bert-small", 28.8, (128, 512)),
        Model("bert-large", 335.2, (128, 512)), Model("roberta-large", 355.4, (128, 512)),
        Model("t5-11b", 11307.3, (512,)),
    ),
    (
        Model("gpt2", 124.4, (256, 1024)), Model("gpt2-medium", 354.8, (256, 1024)),
        Model("gpt2-large", 774.0, (512, 1024)), Model("gpt2-xl", 1557.6, (512, 1024)),
        Model("gpt3-1.3b", 1315.7, (1024, 2048)), Model("gpt3-2.7b", 2651.6, (1024, 2048)),
    ),
)  # fmt: skip
SMALL_MODELS = (
    Model("resnet101", 44.5), Model("vgg19", 143.7), Model("vit-large", 304.3), Model("transformer", 63.0, (64, 256)),
    Model("bert-small", 28.8, (128, 256)), Model("bert-large", 335.2, (128, 256)), Model("gpt2", 124.4, (128, 256)),
    Model("gpt2-medium", 354.8, (128, 256)), Model("gpt2-large", 774.0, (128, 256)),
    Model("gpt2-xl", 1557.6, (128, 256)), Model("gpt3-1.3b", 1315.7, (128, 256)),
)  # fmt: skip

HELD_MODELS = (
    Model("vgg19", 143.7), Model("inception-v3", 23.8), Model("transformer", 63.0, (64, 256)),
    Model("xlnet-large", 361.0, (128, 512)), Model("t5-11b", 11307.3, (512,)), Model("llama3-8b", 8030.3, (1024, 2048)),
)  # fmt: skip


class Host(NamedTuple):
    """A host before it has a name."""

    region: int
    devices: Mapping[str, int]
    nic: float  # Gbit/s


class Case(NamedTuple):
    """What is written of a case."""

    hosts: Sequence[Host]
    links: Sequence[str]
    job: str


class Draw:
    """Draws of one case, from `random()` alone."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def one(self, items: Sequence[T]) -> T:
        """Any of them."""
        return items[int(self.random() * len(items))]

    def whole(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(self.random() * (high - low + 1))

    def even(self, low: float, high: float) -> float:
        """Any number between."""
        return low + self.random() * (high - low)

    def log(self, low: float, high: float) -> float:
        """Every factor of ten as likely as the next."""
        return math.exp(self.even(math.log(low), math.log(high)))

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """Different ones, in random order."""
        left = list(items)
        return [left.pop(int(self.random() * len(left))) for _ in range(count)]

    def parts(self, total: int, count: int) -> list[int]:
        """Whole numbers of at least 1 that add up to the total."""
        cuts = sorted(self.some(range(1, total), count - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def unequal(draw: Draw, number: int) -> Case:
    """A lab or company with machines of several years."""
    regions = number % 3 + 1
    devices = round(draw.log(max(3, regions), 24.4))
    kinds = draw.some(SERVER + DESK, min(devices, draw.whole(2, 5)))
    hosts = housed(draw, kinds, draw.parts(devices, len(kinds)), regions)
    middle = draw.log(0.1, 10)
    links = lan_links(draw, hosts) + wan_links(draw, hosts, (0.1, 10), middle, draw.log(2, 100), trunks=number % 4 == 0)
    return Case(hosts, links, job(draw, hosts, draw.one(FAMILIES), BATCHES[number // 3 % 3], room=0.4))


def geo(draw: Draw, number: int) -> Case:
    """Machines in several cities or continents."""
    regions = (number - 1) // 2 + 2
    hosts = []
    for region in range(regions):
        kinds = draw.some(SERVER + DESK, draw.whole(1, 2))
        counts = [draw.whole(1, 4) for _ in kinds]
        hosts += [host._replace(region=region) for host in housed(draw, kinds, counts, 1)]
    lacking = number % 2 == 1
    middle = 0.01 * 1000 ** ((number * 7 % 10 + draw.random()) / 10)  # each case from another tenth of the span
    across = 3 * 100 ** ((number * 3 % 10 + draw.random()) / 10)
    links = lan_links(draw, hosts)
    links += wan_links(draw, hosts, (0.01, 10), middle, across, trunks=not lacking, lacking=lacking)
    return Case(hosts, links, job(draw, hosts, draw.one(FAMILIES), BATCHES[number % 3], room=0.4))


def small(draw: Draw, number: int) -> Case:
    """Few enough devices for an exact search."""
    tight, devices = number % 3 == 0, 6 if number % 10 else draw.whole(7, 8)
    kinds = [draw.one(LITTLE)] if tight else []
    kinds += draw.some([kind for kind in SERVER + DESK if kind not in kinds], 3 - len(kinds))
    hosts = housed(draw, kinds, draw.parts(devices, 3), 2)
    links = lan_links(draw, hosts) + wan_links(draw, hosts, (0.05, 10), draw.log(0.05, 10), draw.log(2, 100))
    least = min(CATALOG[kind].memory for kind in kinds) / 1e9
    models = [m for m in SMALL_MODELS if (m.millions * 0.016 > least if tight else m.millions * 0.016 < least / 2)]
    return Case(hosts, links, job(draw, hosts, models, SMALL_BATCHES, room=0.5))


def held(draw: Draw, number: int) -> Case:
    """Regions in a star or in a chain: most pairs have no link."""
    regions = 3 + number % 4
    hosts = []
    for region in range(regions):
        kinds = draw.some(SERVER + DESK, draw.whole(1, 2))
        hosts += [host._replace(region=region) for host in housed(draw, kinds, [draw.whole(1, 4) for _ in kinds], 1)]
    links = lan_links(draw, hosts)
    every = wan_links(draw, hosts, (0.05, 10), draw.log(0.1, 10), draw.log(2, 100), trunks=number % 3 == 0)
    pairs = [(a, b) for a in range(regions) for b in range(a + 1, regions)]
    star = number % 2 == 0
    links += [text for (a, b), text in zip(pairs, every, strict=True) if (a == 0 if star else b == a + 1)]
    memory = sum(CATALOG[kind].memory * count for host in hosts for kind, count in host.devices.items())
    fitting = [model for model in HELD_MODELS if model.millions * 16e6 <= 0.4 * memory]
    return Case(hosts, links, job(draw, hosts, [fitting[-1 - number % len(fitting)]], BATCHES[number % 3], room=0.4))


GROUPS = {"unequal": unequal, "geo": geo, "small": small, "held": held}


def housed(draw: Draw, kinds: Sequence[str], counts: Sequence[int], regions: int) -> list[Host]:
    """Hosts for so many devices of each kind: up to 4 under a desk, 8 in a rack; now and then two kinds in one host."""
    boxes: list[dict[str, int]] = []
    for kind, count in zip(kinds, counts, strict=True):
        while count:
            size = min(count, draw.one((2, 4, 8) if kind in SERVER else (1, 2, 4)))
            boxes.append({kind: size})
            count -= size
    while len(boxes) < regions:  # break up the largest
        largest = max(boxes, key=lambda box: sum(box.values()))
        (kind, size), *_ = largest.items()
        largest[kind] = size // 2
        boxes.append({kind: size - size // 2})
    boxes = draw.some(boxes, len(boxes))
    if len(boxes) > regions and draw.random() < 0.3:
        boxes[-2:] = [{kind: boxes[-2].get(kind, 0) + boxes[-1].get(kind, 0) for kind in (boxes[-2] | boxes[-1])}]
    places = [*range(regions), *(draw.whole(0, regions - 1) for _ in boxes[regions:])]
    hosts = [Host(place, box, nic(draw, box)) for place, box in zip(places, boxes, strict=True)]
    return sorted(hosts, key=lambda host: host.region)


def nic(draw: Draw, box: Mapping[str, int]) -> float:
    return draw.one((10, 25, 100) if any(kind in SERVER for kind in box) else (1, 2.5, 10))


def lan_links(draw: Draw, hosts: Sequence[Host]) -> list[str]:
    """One link for each region of several hosts."""
    regions = [host.region for host in hosts]
    return [
        link(region, region, draw.one((1, 10, 25, 100)), draw.log(0.05, 0.5))
        for region in sorted(set(regions))
        if regions.count(region) > 1
    ]


def wan_links(
    draw: Draw,
    hosts: Sequence[Host],
    span: tuple[float, float],
    middle: float,
    across: float,
    *,
    trunks: bool = False,
    lacking: bool = False,
) -> list[str]:
    """Links between regions: around `middle` Gbit/s, within `span`, on a map of `across` ms.

    Where some are `lacking`, the first region still reaches all others.
    """
    count = max(host.region for host in hosts) + 1
    places = [(draw.even(0, across), draw.even(0, across)) for _ in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    optional = [pair for pair in pairs if pair[0]]
    gone = draw.some(optional, max(1, len(optional) * 2 // 5)) if lacking and optional else []
    links = []
    for a, b in pairs:
        gbits = min(max(middle * draw.log(0.3, 3), span[0]), span[1])
        latency = min(max(math.dist(places[a], places[b]) * draw.even(1, 1.5), 1), 300)
        trunk = draw.even(1, 4) * gbits if trunks and draw.random() < 0.6 else None
        if (a, b) not in gone:
            links.append(link(a, b, gbits, latency, trunk))
    return links


def link(a: int, b: int, gbits: float, latency: float, trunk: float | None = None) -> str:
    more = f", trunk: {rate(trunk)}" if trunk is not None else ""
    between = f"[{REGIONS[a]}, {REGIONS[b]}]"
    return f"  - {{between: {between}, bandwidth: {rate(gbits)}, latency: {digits(latency)} ms{more}}}"


def rate(gbits: float) -> str:
    return f"{digits(gbits)} Gbit/s" if gbits >= 1 else f"{digits(gbits * 1e3)} Mbit/s"


def digits(value: float) -> str:
    """Two of them."""
    return f"{float(f'{value:.2g}'):g}"


def job(draw: Draw, hosts: Sequence[Host], models: Sequence[Model], batches: Sequence[int], *, room: float) -> str:
    """A job whose state needs at most `room` of all memory."""
    kinds = {kind for host in hosts for kind in host.devices}
    memory = sum(CATALOG[kind].memory * count for host in hosts for kind, count in host.devices.items())
    model = draw.one([m for m in models if m.millions * 16e6 <= room * memory])
    fields = {"model": f"zoo:{model.name}", "batch": str(draw.one(batches))}
    if model.sequences:
        fields["sequence"] = str(draw.one(model.sequences))
    return ", ".join(f"{key}: {value}" for key, value in (fields | precision(draw, kinds)).items())


def precision(draw: Draw, kinds: set[str]) -> dict[str, str]:
    if draw.random() < 0.5:
        return {"precision": "fp32"}
    if all("bf16" in CATALOG[kind].compute for kind in kinds):
        return {"precision": "bf16"}
    slow = any(CATALOG[kind].computes_in("fp16", mixed=False) is None for kind in kinds)
    return {"precision": "fp16"} | ({"mixed": "true"} if slow else {})


def cluster_text(name: str, case: Case) -> str:
    lines = ["# Drawn by make.py.", "kind: cluster", "version: 1", f"name: {name}", "hosts:"]
    seen: dict[int, int] = {}
    for host in case.hosts:
        seen[host.region] = seen.get(host.region, 0) + 1
        devices = ", ".join(f"{kind}: {count}" for kind, count in host.devices.items())
        region = REGIONS[host.region]
        lines.append(
            f"  {region}{seen[host.region]}: {{region: {region}, devices: {{{devices}}}, nic: {host.nic:g} Gbit/s}}"
        )
    return "\n".join([*lines, *(["links:", *case.links] if case.links else [])]) + "\n"


def files(group: str) -> Iterator[tuple[str, str]]:
    """Names and texts of a group's files."""
    jobs = ["# Drawn by make.py; each job is for the cluster of its name.", "kind: workload", "version: 1"]
    jobs += [f"name: {group}", "jobs:"]
    for number in range(1, COUNTS[group] + 1):
        name = f"{group}-{number:02d}"
        case = GROUPS[group](Draw(SEEDS[group] + number), number)
        jobs.append(f"  - {{name: {name}, {case.job}}}")
        yield f"{group}/{name}.yaml", cluster_text(name, case)
    yield f"{group}/jobs.yaml", "\n".join(jobs) + "\n"


def main() -> None:
    for group in GROUPS:
        for name, text in files(group):
            (FOLDER / name).parent.mkdir(exist_ok=True)
            (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
