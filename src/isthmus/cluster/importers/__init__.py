"""Makes clusters from files and systems that other programs use.

The files in reading order:

- `result.py`: the result of every importer: a cluster, and what was found or assumed on the way.
- `hosts.py`: builds the cluster where a source only names hosts and counts their devices.
- `hostfile.py`: imports hostfiles of MPI and DeepSpeed.
- `slurm.py`: imports the nodes of a Slurm job from its environment variables.
- `hulk.py`: imports the machines and measured times of the Hulk paper.
- `hulk_files.py`: reads the two files of the Hulk data.
- `hulk_clean.py`: finds and corrects errors in the times of the Hulk data.

To add an importer, add a file here with a function that returns `Imported`, and call it in `_imported` in
`isthmus/cli/cluster_import.py`.
"""
