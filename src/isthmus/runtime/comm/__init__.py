"""Communication between the workers of a job during training.

Read the files in this order:

- `channel.py`: messages between two workers over Gloo or NCCL, on a connection of their own.
- `relay.py`: channels between workers that cannot reach each other, over other workers.
- `flows.py`: activations and their gradients between runs, cut by samples.
- `syncs.py`: sums of a bucket's gradients over its participants: `Ring`, `Tree` and `Server`.
- `factors.py`: the sync `factors`, which rebuilds the gradients of linear weights from their factors.
- `factor_exchange.py`: the messages of `factors`, and the order in which weights take turns.
- `unequal_groups.py`: a sync between tensor groups of different sizes.
- `step_sums.py`: sums in the middle of a step, for tensor groups and batch statistics.
- `totals.py`: the number of losses and the norm of the gradient, over all workers.
- `worker_threads.py`: threads that stay, for syncs beside the backward pass.
- `scratch.py`: memory that is given back and used again.

`plan/__init__.py` lists all that has to be done to add a kind of sync.
"""
