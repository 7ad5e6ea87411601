"""Describes the machines of a cluster: what devices they have and how they are linked.

The files in reading order:

- `spec.py`: the types of a loaded cluster, from `DeviceKind` and `Host` to `Cluster`.
- `catalog.py`: the device kinds that a cluster file may name without describing them.
- `places.py`: the known regions, and the latency that is estimated from the distance between two of them.
- `load.py`: reads a cluster file, checks it and fills in what it leaves out.
- `write.py`: writes a cluster as the text of a cluster file.
- `islands.py`: finds groups of hosts that no link joins.
- `importers/`: makes clusters from hostfiles, Slurm jobs and the data of the Hulk paper.

To add a device kind to the catalog, add a `_kind(...)` entry to `_KINDS` in `catalog.py`, under the heading of its
vendor, with a comment that names the vendor's page. To add a region, add a `_place(...)` entry to `_TABLE` in
`places.py`.
"""
