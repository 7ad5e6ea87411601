"""Models and clusters whose times are chosen: every block computes for given seconds, every link is what it says."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.cluster.spec import Cluster, DeviceKind, Host, Link
from isthmus.cost.compute import USUAL
from isthmus.cost.simulate import Price, Simulator
from isthmus.model.graph import Block, BlockGraph, Parameter, Tensor
from isthmus.model.job import Job, Optimizer
from isthmus.plan.types import Pipeline, Plan, Replica, Stage, Sync, Via
from isthmus.plan.validate import check
from isthmus.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

__all__ = [
    "HUGE",
    "NEAR",
    "devices",
    "flat_cluster",
    "pipeline",
    "plan_of",
    "price",
    "replica",
    "ring_sync",
    "stage",
    "timed_model",
]

HUGE = 1e30  # bytes a second: takes no time
NEAR = Link(between=("r", "r"), bandwidth=BytesPerSecond(HUGE), latency=Seconds(0.0))  # joins the hosts of region r
RATE = 1.0 / USUAL.matmul  # FLOP/s at which one FLOP takes one second


def timed_model(
    blocks: int, forward: float, backward: float, *, elements: int = 0, sent: float = 1.0, saved: float = 0.0
) -> BlockGraph:
    """`b0` ... in a row, each with one parameter of `elements`; seconds are per sample, on a device of speed 1."""
    names = [f"b{index}" for index in range(blocks)]
    return BlockGraph(
        name="timed",
        blocks=tuple(
            Block(
                name=name,
                digest=name,
                parameters=(f"{name}.w",),
                forward_flops=forward,
                backward_flops=backward,
                saved=saved,
                moved=0.0,
                weights_moved=0.0,
                operations=0,
            )
            for name in names
        ),
        tensors=tuple(
            Tensor(name=f"{name}.out", source=index, targets=(index + 1,), elements=sent)
            for index, name in enumerate(names[:-1])
        ),
        parameters=tuple(Parameter(name=f"{name}.w", elements=elements, shape=(elements,)) for name in names),
    )


def flat_cluster(
    hosts: dict[str, str],
    links: Sequence[Link] = (),
    *,
    each: int = 1,
    speeds: dict[str, float] | None = None,
    bandwidth: float = HUGE,
    latency: float = 0.0,
    bus: float = HUGE,
    memory_bandwidth: float = HUGE,
) -> Cluster:
    """Hosts by name -> region with `each` devices; a host's speed multiplies what its devices compute."""
    kinds, made = {}, {}
    for name, region in hosts.items():
        speed = (speeds or {}).get(name, 1.0)
        kinds[f"k{speed}"] = DeviceKind(
            name=f"k{speed}",
            compute={"fp32": FlopsPerSecond(RATE * speed), "bf16": FlopsPerSecond(RATE * speed)},
            memory=Bytes(1e12),
            memory_bandwidth=BytesPerSecond(memory_bandwidth),
            bus=BytesPerSecond(bus),
            peer=BytesPerSecond(bandwidth),
        )
        made[name] = Host(
            name=name,
            region=region,
            devices={f"k{speed}": each},
            bandwidth=BytesPerSecond(bandwidth),
            latency=Seconds(latency),
            nic=BytesPerSecond(HUGE),
            bus=BytesPerSecond(bus),
            memory=Bytes(1e13),
            cores=1,
        )
    return Cluster(name="flat", kinds=kinds, hosts=made, links=tuple(links))


def devices(cluster: Cluster) -> list[str]:
    return list(cluster.devices)


def replica(device: str | tuple[str, ...], share: int = 1, slices: int = 1) -> Replica:
    return Replica(devices=(device,) if isinstance(device, str) else device, share=share, slices=slices)


def stage(first: int, last: int, *replicas: Replica, **more: object) -> Stage:
    return Stage(first=f"b{first}", last=f"b{last}", replicas=replicas, **more)  # type: ignore[arg-type]


def pipeline(stages: Sequence[Stage], micro: int, *, size: int = 1, name: str = "job", **more: object) -> Pipeline:
    job = Job(name=name, model="small:timed", batch=micro * size, optimizer=Optimizer(name="adamw"))
    settings: dict[str, object] = {"precision": "fp32", **more}
    return Pipeline(job=job, model_digest="", micro_batches=micro, stages=tuple(stages), **settings)  # type: ignore[arg-type]


def plan_of(*parts: Pipeline, via: Sequence[Via] = ()) -> Plan:
    return Plan(cluster="flat", parts=parts, via=tuple(via))


def price(plan: Plan, cluster: Cluster, graph: BlockGraph) -> Price:
    """Checked, then priced; every job has the one model."""
    models = {part.job.name: graph for part in plan.parts if isinstance(part, Pipeline)}
    check(plan, cluster, models)
    return Simulator(cluster, models).price(plan)


def ring_sync(blocks: Sequence[int], participants: Sequence[str], **more: object) -> Sync:
    settings: dict[str, object] = {"how": "ring", "bucket": f"s{blocks[0]}", **more}
    words = tuple(f"[b{block}]" for block in blocks)
    return Sync(parameters=words, participants=tuple(participants), **settings)  # type: ignore[arg-type]
