"""Plans: what a plan is, how it is written and read, and whether it can be carried out.

In reading order:

- `types.py`: the plan as frozen types.
- `validate.py`: the check of a whole plan, with the name of every rule.
- `rules/`: the rules by what they are about.
- `resolve.py`: a plan in numbers: block ranges, device numbers, sample intervals.
- `schedule.py`: runs, the edges between them, and the order of each device.
- `ring.py`: how a tensor goes around a ring, for runtime and simulator.
- `policy.py`: which unit a free device of a pool takes.
- `relays.py`: which hosts relay messages between hosts without a link.
- `text.py`: the plan as text; `text_parse.py` reads it; `text_lines.py` is the line form under both.
- `file.py`: the plan file, as JSON or text.
- `trust.py`: code that a plan names runs only if the caller names it too.
- `paths.py`: paths in a plan file, relative to the file's folder.
- `parameter_pieces.py`: which device holds which pieces of which parameters.
- `diff.py`: what changes from one plan to the next.

To add a field of the plan, add it with a default to its type in `types.py`; write it in `text.py` and read it in
`text_parse.py`; check it in `rules/` under a rule named in `RULES` (`validate.py`); turn its names into numbers in
`resolve.py`, if it has any; and price it in `cost/plan_arrays.py`. To add a kind of sync, extend `How` in `types.py`,
`rules/sync_rules.py`, and `_sync_pairs` in `rules/connections.py`.

`isthmus.plan` can also be called: it is the verb that finds a plan (`isthmus/__init__.py`).
"""
