"""Choose how the gradients of each bucket are synchronised.

- `ring_order.py`: the order in which a ring crosses slow links least.
- `sync_options.py`: the ways that each bucket has.
- `sync_loads.py`: what each way asks of links and devices, and when.
- `sync_ilp.py`: the integer programme that chooses among them, judged by the simulator.
"""
