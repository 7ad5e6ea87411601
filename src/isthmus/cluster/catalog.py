"""Device kinds that need no description in a cluster file, with the figures that their vendors state.

Rates are dense peaks (data sheets often print twice that, "with sparsity"). fp32 is the rate of the ordinary units:
TF32, which rounds inputs to 10 bits of mantissa, is not fp32. fp16 and bf16 are tensor-core rates with fp32
accumulation, which training needs; GeForce cards from Turing on run that at half of their rate with fp16 accumulation.
A precision that a kind lacks is absent. AMD's matrix units compute true fp32, so theirs is the fp32 rate. Memory is as
sold; the cost model accounts for what a driver keeps for itself. `bus` and PCIe `peer` are rates that copies reach, not
the signalling rate; NVLink `peer` is the sum of one device's links in one direction. Bridges that join pairs of PCIe
cards are left out: among four or eight cards most pairs have none, and a host may give its own `bandwidth`.

Each comment names the vendor's page that the figures are from; "checked" means that the compute and memory figures were
compared with a second public page.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.cluster.spec import DeviceKind, Precision
from isthmus.units import Bytes, BytesPerSecond, FlopsPerSecond

__all__ = ["CATALOG"]

_PCIE3, _PCIE4, _PCIE5 = 12.0, 24.0, 50.0  # GB/s reached by large pinned copies over 16 lanes, each way
_NVLINK2, _NVLINK3, _NVLINK4, _NVLINK5 = 150.0, 300.0, 450.0, 900.0  # GB/s of one V100, A100, H100, B200, each way


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
    """Return a device kind from figures in TFLOP/s, GB and GB/s.

    Without `peer`, copies between devices take the bus.
    """
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
    # NVIDIA, for servers
    # Tesla P100 data sheet (PCIe, 16 GB); fp16 on the ordinary units, at twice the fp32 rate
    _kind("P100", fp32=9.3, fp16=18.7, memory=16, memory_bandwidth=732, bus=_PCIE3),
    # Tesla P40 data sheet; fp16 at 1/64 of the fp32 rate (Pascal tuning guide); checked
    _kind("P40", fp32=11.8, fp16=11.8 / 64, memory=24, memory_bandwidth=346, bus=_PCIE3),
    # V100 Tensor Core GPU data sheet (SXM2); checked. Where there is no NVLink switch a single pair has one or two of
    # the six links (25 GB/s each): give such a host's own `bandwidth`
    _kind("V100-16GB", fp32=15.7, fp16=125, memory=16, memory_bandwidth=900, bus=_PCIE3, peer=_NVLINK2),
    _kind("V100-32GB", fp32=15.7, fp16=125, memory=32, memory_bandwidth=900, bus=_PCIE3, peer=_NVLINK2),
    # T4 Tensor Core GPU data sheet; rates checked (others print 320 GB/s, the pins' rate)
    _kind("T4", fp32=8.1, fp16=65, memory=16, memory_bandwidth=300, bus=_PCIE3),
    # A10 Tensor Core GPU data sheet; fp32 and memory checked
    _kind("A10", fp32=31.2, bf16=125, fp16=125, memory=24, memory_bandwidth=600, bus=_PCIE4),
    # A30 Tensor Core GPU data sheet
    _kind("A30", fp32=10.3, bf16=165, fp16=165, memory=24, memory_bandwidth=933, bus=_PCIE4),
    # A40 data sheet; checked
    _kind("A40", fp32=37.4, bf16=149.7, fp16=149.7, memory=48, memory_bandwidth=696, bus=_PCIE4),
    # A100 Tensor Core GPU data sheet (SXM4, then PCIe); SXM4 checked
    _kind("A100-40GB", fp32=19.5, bf16=312, fp16=312, memory=40, memory_bandwidth=1555, bus=_PCIE4, peer=_NVLINK3),
    _kind("A100-80GB", fp32=19.5, bf16=312, fp16=312, memory=80, memory_bandwidth=2039, bus=_PCIE4, peer=_NVLINK3),
    _kind("A100-80GB-PCIe", fp32=19.5, bf16=312, fp16=312, memory=80, memory_bandwidth=1935, bus=_PCIE4),
    # L4 Tensor Core GPU data sheet, its tensor rates halved: printed with sparsity; checked
    _kind("L4", fp32=30.3, bf16=121, fp16=121, memory=24, memory_bandwidth=300, bus=_PCIE4),
    # L40 and L40S data sheets; checked
    _kind("L40", fp32=90.5, bf16=181, fp16=181, memory=48, memory_bandwidth=864, bus=_PCIE4),
    _kind("L40S", fp32=91.6, bf16=362, fp16=362, memory=48, memory_bandwidth=864, bus=_PCIE4),
    # H100 and H200 Tensor Core GPU data sheets, halved likewise; checked
    _kind("H100-SXM", fp32=67, bf16=989.5, fp16=989.5, memory=80, memory_bandwidth=3350, bus=_PCIE5, peer=_NVLINK4),
    _kind("H100-PCIe", fp32=51, bf16=756.5, fp16=756.5, memory=80, memory_bandwidth=2000, bus=_PCIE5),
    _kind("H200", fp32=67, bf16=989.5, fp16=989.5, memory=141, memory_bandwidth=4800, bus=_PCIE5, peer=_NVLINK4),
    # GH200 Grace Hopper Superchip data sheet (96 GB HBM3); memory and the 450 GB/s of NVLink-C2C each way checked
    _kind("GH200", fp32=67, bf16=989.5, fp16=989.5, memory=96, memory_bandwidth=4000, bus=400, peer=_NVLINK4),
    # HGX B200 data sheet: 180 GB of 192 in use; checked
    _kind("B200", fp32=80, bf16=2250, fp16=2250, memory=180, memory_bandwidth=8000, bus=_PCIE5, peer=_NVLINK5),
    # NVIDIA, for workstations
    # Quadro RTX 8000 data sheet: Turing, with fp32 accumulation at full rate
    _kind("RTX-8000", fp32=16.3, fp16=130.5, memory=48, memory_bandwidth=672, bus=_PCIE3),
    # RTX A4000, A5000 and A6000 data sheets: 153.4, 222.2 and 309.7 with sparsity; A4000 checked
    _kind("RTX-A4000", fp32=19.2, bf16=76.7, fp16=76.7, memory=16, memory_bandwidth=448, bus=_PCIE4),
    _kind("RTX-A5000", fp32=27.8, bf16=111.1, fp16=111.1, memory=24, memory_bandwidth=768, bus=_PCIE4),
    _kind("RTX-A6000", fp32=38.7, bf16=154.8, fp16=154.8, memory=48, memory_bandwidth=768, bus=_PCIE4),
    # RTX 6000 Ada Generation data sheet: 728.5 with sparsity
    _kind("RTX-6000-Ada", fp32=91.1, bf16=364.2, fp16=364.2, memory=48, memory_bandwidth=960, bus=_PCIE4),
    # NVIDIA, for desks
    # GeForce GTX 1080, 1080 Ti and TITAN Xp specifications, Pascal tuning guide: fp16 runs at 1/64 of the fp32 rate
    _kind("GTX-1080", fp32=8.9, fp16=8.9 / 64, memory=8, memory_bandwidth=320, bus=_PCIE3),
    _kind("GTX-1080Ti", fp32=11.3, fp16=11.3 / 64, memory=11, memory_bandwidth=484, bus=_PCIE3),
    _kind("TITAN-Xp", fp32=12.1, fp16=12.1 / 64, memory=12, memory_bandwidth=547.7, bus=_PCIE3),
    # Turing architecture paper (reference clocks); TITAN RTX specifications: fp32 accumulation runs at full rate
    _kind("RTX-2080Ti", fp32=13.4, fp16=53.8, memory=11, memory_bandwidth=616, bus=_PCIE3),
    _kind("TITAN-RTX", fp32=16.3, fp16=130.5, memory=24, memory_bandwidth=672, bus=_PCIE3),
    # Ampere GA102 architecture paper: fp32 accumulation, dense; RTX 3090 checked
    _kind("RTX-3080", fp32=29.8, bf16=59.5, fp16=59.5, memory=10, memory_bandwidth=760, bus=_PCIE4),
    _kind("RTX-3090", fp32=35.6, bf16=71, fp16=71, memory=24, memory_bandwidth=936, bus=_PCIE4),
    # Ada architecture paper, likewise; RTX 4090 checked
    _kind("RTX-4080", fp32=48.7, bf16=97.5, fp16=97.5, memory=16, memory_bandwidth=716.8, bus=_PCIE4),
    _kind("RTX-4090", fp32=82.6, bf16=165.2, fp16=165.2, memory=24, memory_bandwidth=1008, bus=_PCIE4),
    # RTX Blackwell architecture paper, likewise; fp32 and memory checked
    _kind("RTX-5090", fp32=104.8, bf16=209.5, fp16=209.5, memory=32, memory_bandwidth=1792, bus=_PCIE5),
    # AMD
    # Instinct MI100 data sheet; Infinity Fabric joins each pair of four by a link of 46 GB/s each way
    _kind("MI100", fp32=46.1, bf16=92.3, fp16=184.6, memory=32, memory_bandwidth=1228.8, bus=_PCIE4, peer=46),
    # Instinct MI210 data sheet
    _kind("MI210", fp32=45.3, bf16=181, fp16=181, memory=64, memory_bandwidth=1638.4, bus=_PCIE4),
    # Instinct MI250X data sheet, halved: the module's two dies are two devices to PyTorch; checked. 50 GB/s a link
    _kind("MI250X", fp32=47.9, bf16=191.5, fp16=191.5, memory=64, memory_bandwidth=1638.4, bus=_PCIE4, peer=50),
    # Instinct MI300X and MI325X data sheets; MI300X checked. Each pair of the eight has a link, 64 GB/s each way
    _kind("MI300X", fp32=163.4, bf16=1307.4, fp16=1307.4, memory=192, memory_bandwidth=5300, bus=_PCIE5, peer=64),
    _kind("MI325X", fp32=163.4, bf16=1307.4, fp16=1307.4, memory=256, memory_bandwidth=6000, bus=_PCIE5, peer=64),
    # No data sheet: one server processor of 16 cores, 2.0 GHz x 16 fp32 multiply-adds x 2 FLOP = 64 GFLOP/s a core;
    # four memory channels. bf16 has no fast units without AMX. Bus and peer are copies within main memory.
    _kind("CPU", fp32=1.0, memory=64, memory_bandwidth=80, bus=20, peer=10),
)

CATALOG: Mapping[str, DeviceKind] = {kind.name: kind for kind in _KINDS}
