"""The command line: one module for each command, and what the commands share.

In reading order:

- `main.py`: runs one command, and turns every error into an exit code.
- `arguments.py`: the options of all commands.
- `console.py`: progress while a command works, and its answer.
- `plan.py`, `simulate.py`, `explain.py`, `report.py`: commands about plans.
- `train.py`: trains by a plan; `watch.py`: the bar, the file of events and TensorBoard.
- `model.py`, `profile.py`, `export.py`: commands about models, their times and their weights.
- `cluster.py`, `cluster_import.py`, `cluster_probe.py`: commands about clusters.
- `emulate.py`: runs a command on emulated hosts.
- `doctor.py`: checks this machine.
- `summary.py`: what several commands report of a priced plan.

To add a command, add its parser in `build_parser` (`arguments.py`), and a module of the name that `_add` gets (its
`command`, or else the command's own name), with a function `run(args, progress)` that returns an `Answer`. Nothing else
registers commands: `main.py` imports the module by that name.
"""
