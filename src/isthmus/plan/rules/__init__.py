"""The rules that a plan must keep, by what they are about; `plan.validate.check` calls them in this order.

- `shape.py`: the plan by itself: numbers, names, shares and jobs.
- `stages.py`: stages, tensor groups, precision and placement on the cluster's devices.
- `sync_rules.py`: parameters, participants and methods of the syncs.
- `connections.py`: links and relays between the hosts that must talk.

To add a rule, give it a name and a line in `RULES` (`plan/validate.py`), and raise `PlanError` with that name in the
file above that it belongs to.
"""
