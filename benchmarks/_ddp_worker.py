"""One device of benchmarks/training.py under stock DDP, as slow as the emulated device is."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from isthmus.model.job import Job
from isthmus.runtime.data.sample_order import SampleOrder
from isthmus.runtime.data.sources import open_samples
from isthmus.runtime.pace import Pace
from isthmus.runtime.process_memory import keep_freed_memory
from isthmus.runtime.worker_run import build_model


def main() -> None:
    """Rank, number of devices, a file to meet by, how much slower than a core, model, sequence, batch, steps."""
    rank, count, store, slower, model, sequence, batch, steps = sys.argv[1:]
    torch.set_num_threads(1)
    here, workers = int(rank), int(count)
    job = Job(name="job", model=model, batch=int(batch), sequence=int(sequence) or None)
    built, loss = build_model(job)
    samples = open_samples(job, built)
    order = SampleOrder(seed=job.seed, count=samples.count)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=here, world_size=workers)
    module, pace, share = DistributedDataParallel(built.module), Pace(float(slower)), job.batch // workers
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        pace.keep()
        return allreduce_hook(dist.group.WORLD, bucket)

    module.register_comm_hook(None, reduce)  # what DDP does itself, but when the slow device would
    keep_freed_memory()
    times = []
    for step in range(int(steps)):
        began = time.perf_counter()
        pace.start()
        example, target = samples.get(order.numbers(step, job.batch)[here * share : (here + 1) * share])
        total, number = loss(module(*example.args, **example.kwargs), target)
        pace.keep()
        (total / number).backward()
        pace.start()  # after waiting for the last sums; what was computed before them was kept to pace with each bucket
        optimizer.step()
        optimizer.zero_grad()
        pace.keep()
        times.append(time.perf_counter() - began)
    dist.barrier()
    if here == 0:
        print(json.dumps(times), flush=True)
    os._exit(0)  # Gloo's threads may still be busy with the last message


if __name__ == "__main__":
    main()
