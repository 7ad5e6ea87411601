"""Device kinds that need no description in a cluster file, as their vendors state them.

Rates are dense peaks (data sheets often print twice that, "with sparsity"). fp32 is the rate of the ordinary units:
TF32, which rounds inputs to 10 bits of mantissa, is not fp32. fp16 and bf16 are tensor-core rates with fp32
accumulation, which training needs. A precision that a kind lacks is absent. Memory is as sold; what a driver keeps for
itself is the cost model's matter. `bus` and PCIe `peer` are rates that copies reach, not the signalling rate; NVLink
`peer` is the sum of one device's links in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.cluster.spec import DeviceKind, Precision
from isthmus.units import Bytes, BytesPerSecond, FlopsPerSecond

__all__ = ["CATALOG"]

_PCIE3, _PCIE4, _PCIE5 = 12.0, 24.0, 50.0  # GB/s reached by large pinned copies over 16 lanes, each way
_NVLINK2, _NVLINK3, _NVLINK4 = 150.0, 300.0, 450.0  # GB/s of one V100, A100, H100, each way


def _kind(
    name: str,
    *,
    fp32: float,
    bf16: float | None = None,
    fp16: float | None = None,
    memory: float,
    memory_bandwidth: float,
    bus: float,
    peer: float | None = None,
) -> DeviceKind:
    """A kind from TFLOP/s, GB and GB/s; `peer` absent: over the bus."""
    rates: dict[Precision, float | None] = {"fp32": fp32, "bf16": bf16, "fp16": fp16}
    return DeviceKind(
        name=name,
        compute={precision: FlopsPerSecond(rate * 1e12) for precision, rate in rates.items() if rate is not None},
        memory=Bytes(memory * 1e9),
        memory_bandwidth=BytesPerSecond(memory_bandwidth * 1e9),
        bus=BytesPerSecond(bus * 1e9),
        peer=BytesPerSecond((bus if peer is None else peer) * 1e9),
    )


_KINDS = (
    # NVIDIA A100 Tensor Core GPU data sheet (SXM4)
    _kind("A100-40GB", fp32=19.5, bf16=312, fp16=312, memory=40, memory_bandwidth=1555, bus=_PCIE4, peer=_NVLINK3),
    _kind("A100-80GB", fp32=19.5, bf16=312, fp16=312, memory=80, memory_bandwidth=2039, bus=_PCIE4, peer=_NVLINK3),
    # NVIDIA H100 Tensor Core GPU data sheet; its tensor rates are printed with sparsity, halved here
    _kind("H100-SXM", fp32=67, bf16=989.5, fp16=989.5, memory=80, memory_bandwidth=3350, bus=_PCIE5, peer=_NVLINK4),
    # NVLink bridges of the PCIe card join pairs only, so its peers are priced over PCIe
    _kind("H100-PCIe", fp32=51, bf16=756.5, fp16=756.5, memory=80, memory_bandwidth=2000, bus=_PCIE5),
    # NVIDIA H200 Tensor Core GPU data sheet (SXM), halved likewise
    _kind("H200", fp32=67, bf16=989.5, fp16=989.5, memory=141, memory_bandwidth=4800, bus=_PCIE5, peer=_NVLINK4),
    # NVIDIA V100 Tensor Core GPU data sheet (SXM2); where there is no NVLink switch a single pair has one or two of the
    # six links (25 GB/s each): give such a host's own `bandwidth`
    _kind("V100-16GB", fp32=15.7, fp16=125, memory=16, memory_bandwidth=900, bus=_PCIE3, peer=_NVLINK2),
    _kind("V100-32GB", fp32=15.7, fp16=125, memory=32, memory_bandwidth=900, bus=_PCIE3, peer=_NVLINK2),
    # NVIDIA Tesla P100 data sheet (PCIe, 16 GB); fp16 on the ordinary units, at twice the fp32 rate
    _kind("P100", fp32=9.3, fp16=18.7, memory=16, memory_bandwidth=732, bus=_PCIE3),
    # NVIDIA T4 Tensor Core GPU data sheet
    _kind("T4", fp32=8.1, fp16=65, memory=16, memory_bandwidth=300, bus=_PCIE3),
    # NVIDIA L4 Tensor Core GPU data sheet, halved
    _kind("L4", fp32=30.3, bf16=121, fp16=121, memory=24, memory_bandwidth=300, bus=_PCIE4),
    # NVIDIA A10 Tensor Core GPU data sheet
    _kind("A10", fp32=31.2, bf16=125, fp16=125, memory=24, memory_bandwidth=600, bus=_PCIE4),
    # NVIDIA A40 data sheet; bridges join pairs only
    _kind("A40", fp32=37.4, bf16=149.7, fp16=149.7, memory=48, memory_bandwidth=696, bus=_PCIE4),
    # NVIDIA RTX A5000 data sheet: 222.2 with sparsity
    _kind("RTX-A5000", fp32=27.8, bf16=111.1, fp16=111.1, memory=24, memory_bandwidth=768, bus=_PCIE4),
    # NVIDIA Pascal tuning guide and GeForce GTX 1080 Ti specifications: fp16 runs at 1/64 of the fp32 rate
    _kind("GTX-1080Ti", fp32=11.3, fp16=11.3 / 64, memory=11, memory_bandwidth=484, bus=_PCIE3),
    # NVIDIA TITAN Xp specifications: Pascal, as above
    _kind("TITAN-Xp", fp32=12.1, fp16=12.1 / 64, memory=12, memory_bandwidth=547.7, bus=_PCIE3),
    # NVIDIA Turing architecture paper (reference clocks): fp16 with fp32 accumulation is half of that with fp16
    _kind("RTX-2080Ti", fp32=13.4, fp16=53.8, memory=11, memory_bandwidth=616, bus=_PCIE3),
    # NVIDIA Ampere GA102 architecture paper: fp32 accumulation, dense
    _kind("RTX-3090", fp32=35.6, bf16=71, fp16=71, memory=24, memory_bandwidth=936, bus=_PCIE4),
    # NVIDIA Ada architecture paper: fp32 accumulation, dense
    _kind("RTX-4090", fp32=82.6, bf16=165.2, fp16=165.2, memory=24, memory_bandwidth=1008, bus=_PCIE4),
    # AMD Instinct MI300X data sheet; every pair of the eight has its own Infinity Fabric link, 64 GB/s each way
    _kind("MI300X", fp32=163.4, bf16=1307.4, fp16=1307.4, memory=192, memory_bandwidth=5300, bus=_PCIE5, peer=64),
    # No data sheet: one server processor of 16 cores, 2.0 GHz x 16 fp32 multiply-adds x 2 FLOP = 64 GFLOP/s a core;
    # four memory channels. bf16 has no fast units without AMX. Bus and peer are copies within main memory.
    _kind("CPU", fp32=1.0, memory=64, memory_bandwidth=80, bus=20, peer=10),
)

CATALOG: Mapping[str, DeviceKind] = {kind.name: kind for kind in _KINDS}
