"""One host of benchmarks/rings.py: sums a tensor with the others, by torch's own all-reduce and by ours, in turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from isthmus.runtime.comm.channel import Channels
from isthmus.runtime.comm.syncs import Ring


def main() -> None:
    """Rank, number of hosts, a file to meet by, the interface, bytes, repeats."""
    rank, count, store, interface, size, repeats = sys.argv[1:]
    torch.set_num_threads(1)
    here, hosts = int(rank), int(count)
    stock = FileStore(store + ".stock", hosts)
    dist.init_process_group("gloo", store=stock, rank=here, world_size=hosts)
    network = Channels(FileStore(store, hosts), f"h{here}", interface=interface)
    before, after = (network.channel("ring", f"h{(here + way) % hosts}") for way in (-1, 1))
    network.connect()
    ring = Ring(before, after, here, hosts)
    tensor = torch.ones(int(size) // 4)
    times: dict[str, list[float]] = {"stock": [], "ours": []}
    ways: dict[str, Callable[[torch.Tensor], object]] = {"stock": dist.all_reduce, "ours": ring.all_reduce}
    for repeat in range(int(repeats) + 1):
        for name, reduce in ways.items():
            dist.barrier()
            tensor.fill_(here + 1)
            began = time.perf_counter()
            reduce(tensor)
            seconds = torch.tensor(time.perf_counter() - began)
            assert (tensor == hosts * (hosts + 1) // 2).all(), name
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if repeat:  # the first also opens the windows of its connections
                times[name].append(float(seconds))
    if here == 0:
        print(json.dumps(times), flush=True)
    dist.barrier()
    network.close()


if __name__ == "__main__":
    main()
