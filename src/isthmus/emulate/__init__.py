"""Emulate a cluster's hosts and links on one Linux machine, so that plans can be trained and compared without it.

Read the files in this order:

- `world.py`: `World`, the hosts of a cluster as network namespaces with a router between them.
- `act.py`: `Emulation`, a world whose devices also compute at the relative speeds of the cluster's devices.
- `links.py`: the resources that packets pass, and the route of each pair of hosts over them.
- `router.py`: the process that reads every packet and delivers it when it would arrive.
- `queues.py`: when each packet arrives, by fair queueing at every resource of its route.
- `namespaces.py`: creates, enters, finds and removes network namespaces and their TUN devices.
- `placeholder.py`: runs a command that ends with whoever started it.
"""
