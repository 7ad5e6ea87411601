"""What a worker does while it trains: run its blocks, exchange tensors with other workers, update, and save.

Read the files in this order:

- `program.py`: what each worker does in a step, compiled from a plan before anything runs.
- `protocol.py`: the messages between a worker and the process that started it.
- `worker_process.py`: a worker as a process, which takes one order and sends events.
- `worker_run.py`: the life of a worker: create it, step, save, report.
- `worker.py`: `Worker`, which ties blocks, buckets and channels together into a step.
- `executor.py`: runs the actions of a step in order, and sends what others wait for.
- `block_calls.py`: calls blocks with the random numbers of their samples.
- `block_functions.py`: exported blocks as functions of keys, tensors and inputs.
- `compiler.py`: compiles blocks with `torch.compile`, several at once and equal ones once.
- `placed_blocks.py`: the blocks that a worker computes, divided for tensor groups and moved to its device.
- `buckets.py`: parameters as flat tensors, whose gradients are summed as soon as they are final.
- `optimizer.py`: the update of a bucket's flat tensor, and the loss scale of fp16.
- `learning_rate.py`: the learning rate over the steps.
- `sharded_weights.py`: gathers weights and scatters gradients of `sharded-all` stages.
- `weight_turns.py`: the order in which a worker uses sharded weights, and whether all workers reach its end.
- `batch_statistics.py`: batch norm over all replicas of a stage.
- `starting_weights.py`: weights from safetensors files.
- `loss.py`: the loss, checked when it is first used.
- `sample_check.py`: checks in the first step that blocks keep samples apart.
- `pace.py`: slows a worker down to the speed of an emulated device.
- `process_memory.py`: what the process does with freed memory, and its peak.

The folders hold `comm/` (messages and sums between workers), `checkpoint/`, `data/`, `random/` and `profiling/`.

To add an optimizer, add its name, its settings and the number of its moments (which memory and `diff` count) to
`Optimizer` in `isthmus/model/job.py`, the rules of its settings to `_broken_optimizer` in `isthmus/model/load_job.py`,
and its name and settings to the text form (`isthmus/plan/text.py` and `text_parse.py`). Then create it in `_optimizer`
and list its state in `quantities`, both in `optimizer.py`; see there whether `Updater.load` has all that it needs. Its
rule must work element by element. For checkpoints, list the state in `Quantity` and `quantities_of`
(`checkpoint/manifest.py`) and in `_QUANTITIES` (`checkpoint/worker_state.py`). `isthmus/cli/train.py` prints its
settings.

To add a shape of learning rates, add its name to `SHAPES` in `isthmus/model/job.py`, and its formula to `_SHAPES` in
`learning_rate.py`.
"""
