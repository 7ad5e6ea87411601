"""Measure a model on a device of this machine, for a profile that the cost model uses.

Read the files in this order:

- `block_times.py`: `profile_model`, which measures the forward and backward of every distinct block.
- `machine.py`: the device that is measured, and what a cluster file calls it.
- `worker_times.py`: what a worker needs besides its blocks: updates, additions and its own memory.
"""
