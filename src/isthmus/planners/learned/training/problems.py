"""Random problems that look like real ones: what the network is trained on.

Clusters are drawn in three kinds: a *lab* (hosts of unequal years in one memory), a *campus* (two or three rooms joined
by good links) and a *wan* (two to five cities, every pair linked, now and then by a trunk that all pairs share). Models
are variants of four families: GPT and BERT of several depths and widths, vision transformers, residual networks. A
problem is given by its seed alone. Left out, so that what was learned can be judged on what was never seen: all other
families of models, and clusters in which some pairs have no link.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from isthmus.cluster.load import build_cluster
from isthmus.cluster.spec import Cluster, Precision
from isthmus.model.cache import content_key, model_code, read, write
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.planners.problem import Problem, build_problem

if TYPE_CHECKING:
    from isthmus.model.built import BuiltModel

__all__ = ["FAMILIES", "SEEDS", "TOPOLOGIES", "Variant", "graph_of", "random_case", "random_cluster", "random_problem"]

SEEDS = range(7_000_000, 8_000_000)  # of training problems; no benchmark draws from these
TOPOLOGIES = ("lab", "campus", "wan")
_MOST_BLOCKS = 28
_ROOM = 0.5  # part of all memory that a model's state may take
_SERVER = ("A100-40GB", "A100-80GB", "A10", "A40", "H100-PCIe", "L4", "L40S", "P100", "T4", "V100-16GB", "V100-32GB")
_DESK = ("GTX-1080Ti", "RTX-2080Ti", "RTX-3080", "RTX-3090", "RTX-4080", "RTX-4090", "RTX-A4000", "RTX-A5000")
_BATCHES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class Variant(NamedTuple):
    """A model: builder of the zoo (`module.function`), its sizes, the sequences that are drawn from."""

    builder: str
    sizes: tuple[tuple[str, Any], ...]
    sequences: tuple[int | None, ...]


def _gpt(layers: int, width: int) -> Variant:
    sizes = {"layers": layers, "width": width, "heads": width // 64, "longest": 2048, "dropout": 0.0}
    return Variant("gpt.gpt", tuple(sizes.items()), (192, 384, 768, 1536))


def _bert(layers: int, width: int) -> Variant:
    sizes = {"layers": layers, "width": width, "heads": width // 64, "inner": 4 * width, "longest": 512}
    return Variant("bert.bert", tuple(sizes.items()), (96, 384))


def _vit(layers: int, width: int, size: int) -> Variant:
    sizes = {"layers": layers, "width": width, "heads": width // 64, "size": size, "patch": 16}
    return Variant("vit.vit", tuple(sizes.items()), (None,))


def _resnet(bottlenecks: tuple[int, int, int, int], widening: int) -> Variant:
    return Variant("vision.resnet", (("bottlenecks", bottlenecks), ("widening", widening)), (None,))


FAMILIES: Mapping[str, Sequence[Variant]] = {
    "gpt": [_gpt(*sizes) for sizes in ((6, 512), (10, 640), (14, 896), (20, 1152), (28, 1408), (22, 1792), (26, 2304))],
    "bert": [_bert(*sizes) for sizes in ((6, 384), (10, 640), (14, 896), (18, 1152), (22, 1280))],
    "vit": [_vit(*sizes) for sizes in ((8, 512, 224), (14, 896, 224), (20, 1152, 256))],
    "resnet": [
        _resnet(*sizes) for sizes in (((3, 4, 6, 3), 1), ((3, 6, 18, 3), 1), ((3, 8, 30, 3), 1), ((3, 4, 12, 3), 2))
    ],
}


def random_problem(seed: int) -> Problem:
    """Make the problem of a seed."""
    cluster, job, graph = random_case(seed)
    return build_problem(cluster, (job,), {job.name: graph}, seed)


def random_case(seed: int) -> tuple[Cluster, Job, BlockGraph]:
    """Make the cluster, the job and the model of a seed."""
    draw = random.Random(seed)
    cluster = random_cluster(draw, seed)
    memory = sum(float(cluster.kinds[device.kind].memory) for device in cluster.devices.values())
    family = FAMILIES[draw.choice(list(FAMILIES))]
    fitting = [variant for variant in family if 16.0 * _elements(variant) <= _ROOM * memory] or family[:1]
    variant = draw.choice(fitting)
    graph = graph_of(variant, draw.choice(variant.sequences))
    kinds = cluster.kinds.values()
    wide = draw.random() < 0.5
    precision: Precision = "fp32" if wide else "bf16" if all("bf16" in kind.compute for kind in kinds) else "fp16"
    mixed = precision == "fp16" and any(kind.computes_in("fp16", mixed=False) is None for kind in kinds)
    batch = draw.choice(_BATCHES)
    job = Job(
        name=cluster.name,
        model=f"{graph.name}.json",
        batch=batch,
        sequence=graph.sequence,
        precision=precision,
        mixed=mixed,
    )
    return cluster, job, graph


def random_cluster(draw: random.Random, seed: int) -> Cluster:
    """Make a cluster: the first thing that is drawn for a seed."""
    topology = draw.choice(TOPOLOGIES)
    return _cluster(draw, topology, f"{topology}-{seed}")


@cache
def _elements(variant: Variant) -> int:
    module = _built(variant, variant.sequences[0]).module
    return sum(parameter.numel() for parameter in module.parameters())


@cache
def graph_of(variant: Variant, sequence: int | None) -> BlockGraph:
    """Capture a variant in few blocks; the result is kept in the cache of captured models."""
    key = content_key(["training", repr(variant), str(sequence), str(_MOST_BLOCKS), model_code()])
    stored = read(key)
    if stored is not None:
        return msgspec.json.decode(stored, type=BlockGraph)
    from isthmus.model.capture import capture

    built = _built(variant, sequence)
    example = built.example(2, device="meta")
    graph = capture(built.module, example, name=built.name, sequence=built.sequence, max_blocks=_MOST_BLOCKS)
    write(key, msgspec.json.encode(graph))
    return graph


def _built(variant: Variant, sequence: int | None) -> BuiltModel:
    """Build the model itself, without memory for its weights."""
    import torch

    from isthmus.model.zoo import bert, gpt, vision, vit

    builders: Mapping[str, Callable[..., BuiltModel]] = {
        "gpt.gpt": gpt.gpt,
        "bert.bert": bert.bert,
        "vit.vit": vit.vit,
        "vision.resnet": vision.resnet,
    }
    sizes = [str(value).replace(" ", "") for _, value in variant.sizes[:2]]
    name = "-".join([variant.builder.partition(".")[2], *sizes, str(sequence)])
    with torch.device("meta"):
        return builders[variant.builder](name=name, sequence=sequence, **dict(variant.sizes))


def _cluster(draw: random.Random, topology: str, name: str) -> Cluster:
    regions = {"lab": 1, "campus": draw.choice((2, 3)), "wan": draw.choice((2, 3, 4, 5))}[topology]
    devices = max(regions, round(math.exp(draw.uniform(math.log(3), math.log(24)))))
    kinds = draw.sample(_SERVER + _DESK, min(devices, draw.randint(1, 5)))
    hosts: dict[str, dict[str, Any]] = {}
    left, at = devices, 0
    while left > 0:
        kind = kinds[at % len(kinds)] if at < len(kinds) else draw.choice(kinds)
        size = min(left, draw.choice((1, 2, 4, 8) if kind in _SERVER else (1, 2, 3, 4)))
        held = {kind: size}
        if draw.random() < 0.1 and left > size and len(kinds) > 1:  # two kinds in one host
            held[draw.choice([other for other in kinds if other != kind])] = 1
        region = at if at < regions else draw.randrange(regions)
        nic = draw.choice((10, 25, 100) if kind in _SERVER else (1, 2.5, 10))
        hosts[f"h{at}"] = {"region": f"r{region}", "nic": f"{nic} Gbit/s", "devices": held}
        left, at = left - sum(held.values()), at + 1
    present = sorted({str(host["region"]) for host in hosts.values()})
    return build_cluster({"name": name, "hosts": hosts, "links": _links(draw, topology, present)}, name)


def _links(draw: random.Random, topology: str, regions: Sequence[str]) -> list[dict[str, Any]]:
    links: list[dict[str, Any]] = []
    middle, across = (draw.uniform(1, 25), 2.0) if topology == "campus" else (
        math.exp(draw.uniform(math.log(0.05), math.log(10))), math.exp(draw.uniform(math.log(4), math.log(200)))
    )  # fmt: skip
    trunks = draw.random() < 0.3
    for i, a in enumerate(regions):
        lan = {"bandwidth": f"{draw.choice((1, 10, 25, 100))} Gbit/s", "latency": f"{draw.uniform(0.05, 0.5):.3f} ms"}
        links.append({"between": (a, a), **lan})
        for b in regions[i + 1 :]:
            gbits = middle * math.exp(draw.uniform(-1.1, 1.1))
            link = {"between": (a, b), "bandwidth": f"{gbits * 1e3:.3g} Mbit/s"}
            link["latency"] = f"{across * draw.uniform(0.2, 1.0):.3g} ms"
            if trunks and draw.random() < 0.6:
                link["trunk"] = f"{gbits * 1e3 * draw.uniform(1, 4):.3g} Mbit/s"
            links.append(link)
    return links
