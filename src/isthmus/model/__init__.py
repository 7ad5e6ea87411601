"""Builds models, cuts them into blocks, and describes what each block costs.

The files in reading order:

- `job.py`: the job, the optimizer and the workload that a user asks for.
- `load_job.py`: reads job and workload files, and checks every rule that a job must keep.
- `requests.py`: turns what a caller gives (a name, a file, a job) into jobs and their block graphs.
- `source.py`: finds a model by its name, and loads its block graph from a file, from the cache or by capture.
- `built.py`: a model that has been built, with its data and loss.
- `function.py`: models that a user's function builds.
- `hf.py`: models from a transformers configuration.
- `zoo/`: the built-in models.
- `parameter_groups.py`: the parameters that a job freezes, and the optimizer's groups of the others.
- `targets.py`: refuses a job whose model has nothing to train towards.
- `graph.py`: the block graph, which is all that planners and the simulator know of a model.
- `capture.py`: makes the block graph of a model.
- `torch_export.py`: exports a model's operations by `torch.export`, with the batch size left open.
- `repeated_calls.py`: checks that a model does the same operations with the same numbers in every call.
- `hidden_state.py`: refuses a model whose calls change what it keeps in Python.
- `seen_by.py`: finds what a model's functions see besides its modules.
- `restored_state.py`: runs a module and puts back what its forward changed.
- `gradients.py`: refuses a model that defines gradients which export would lose.
- `quiet.py`: silences a warning of torch.
- `single_sample.py`: refuses a model that computes something else for a batch of one sample.
- `regions.py`: opens the nested graphs of an exported program.
- `trace.py`: reads an exported program as one list of operations.
- `unreached.py`: finds the parameters that no loss can reach.
- `flow.py`: finds views, gradients and constants among the operations, and how the results of a split batch combine.
- `costs.py`: the FLOPs, the memory and the traffic of each operation.
- `blocks.py`: chooses where to cut the list of operations.
- `sections.py`: cuts a trace into sections, one for each block.
- `describe.py`: describes the sections as a block graph.
- `modules.py`: makes blocks from child modules, for models that cannot be exported.
- `runnable_blocks.py`: makes blocks that can be run.
- `samples/`: proves or measures that a model keeps the samples of a batch apart.
- `tensor_parallel/`: divides blocks over the devices of a tensor group.
- `saved.py`: writes a block graph to a file, and reads it back.
- `digest.py`: the hash of a block graph.
- `cache.py`: the folder of captured models.
- `fingerprint.py`: the hash of a model that a user's function built.
- `profile.py`: measured times of blocks and collectives.
- `load_profile.py`: reads, checks and writes profile files.
"""
