"""The cost model: what a plan costs in seconds per step and bytes of memory, found by simulating one step.

In reading order:

- `simulate.py`: the `Simulator`, which takes a plan through all the files below to its price.
- `network.py`: the cluster as lanes, routes and shared resources.
- `compute.py`: how long a block computes, from the catalog (roofline).
- `profiled.py`: how long a block computes, from a measured profile.
- `tables.py`: the sums over a model's blocks from which any stage and bucket is priced.
- `plan_arrays.py`: a pipeline as flat arrays of bytes and seconds.
- `task_types.py`: the array types between a plan and its tasks.
- `task_list.py`: the list of tasks and edges, and how a task or message is written to it.
- `build_tasks.py`: the tasks of one step: forwards, backwards, messages between runs, updates, gathering of weights.
- `bucket_tasks.py`: the tasks that synchronise one bucket.
- `collectives.py`: the messages of each kind of sync.
- `total_tasks.py`: the messages that all devices wait for before they update.
- `measured_syncs.py`: how syncs with measured times are played.
- `event_engine.py`: the event queue, with max-min fair sharing of links; it gives the start and end of each task.
- `memory.py`: the peak memory of each device.
- `pool.py`: the units, tasks and memory of a pool.
- `replicas/`: pricing of large plans that consist of copies of a smaller one.
- `timeline.py`: what every device and link did in a played step.
- `critical.py`: the critical path of a played step.
- `sources.py`: which times of a plan were measured.
- `runnable.py`: which plans can be priced but not run.
- `calibrate.py`: how constants are fitted to measurements.
- `version.py`: the version of the cost model.

`plan/__init__.py` lists all that has to be done to add a kind of sync.
"""
