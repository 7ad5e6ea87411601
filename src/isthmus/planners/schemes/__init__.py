"""Propose the usual ways to train, each as good as its users would make it.

- `all_schemes.py`: the list of all schemes, with what each is.
- `fix.py`: degrees that a user pins for `grid`.
- `device_sets.py`: the sets of devices that schemes try.
- `data_parallel.py`: `data-even` and `data`.
- `staged_ideas.py`: ideas of pipelines whose stages are given; what the schemes below share.
- `grid.py`: `grid` and `tensor`: equal tensor, pipeline and data degrees.
- `fsdp.py`: `fsdp`: state sharded over all devices.
- `region.py`: `region`: a pipeline of regions.
- `classes.py`: `classes`: stages of one kind and region each.
- `plain_ddp.py`: data parallelism over all devices as they are, which is priced beside the schemes.
- `scheme_search.py`: the search for a scheme's best plan, which can be left and taken up again.
"""
