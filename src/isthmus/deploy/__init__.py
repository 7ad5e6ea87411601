"""Run a plan: start its workers somewhere, follow them to the end, and leave nothing behind.

Read the files in this order:

- `engine.py`: the protocols `Engine` and `Running`, and the notices that an engine passes on.
- `training.py`: `train`, which sends orders, follows notices, finishes checkpoints and reports one error on failure.
- `local.py`: `LocalEngine`, which runs each worker as a process of this machine or of an emulated host.
- `cleanup_process.py`: the process that cleans up if the parent of the workers is killed.
- `free_memory.py`: how much memory is free, and whether the workers fit into it.
- `worker_timeline.py`: the measured timeline of a step, in the form that the simulator produces.
- `join.py`: `Joined`, a plan whose workers are threads of the caller's own training loop.
- `probing/`: measures the links and the all-reduces of a cluster.

To add an engine, write a file beside `local.py` with a class that implements `Engine`; its `start` returns an object
that implements `Running` (both in `engine.py`). The worker's side is `isthmus.runtime.worker_process`, which takes a
`Start` line and sends the events of `isthmus.runtime.protocol`. In Python the engine is passed to `isthmus.train(...,
engine=...)`. For the command line, add its name to the choices of `--engine` in `cli/arguments.py`, and create it in
`_trained` in `cli/train.py`, which creates a `LocalEngine` now.
"""
