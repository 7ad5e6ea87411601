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
`resolve.py`, if it has any; and price it in `cost/plan_arrays.py`.

To add a kind of sync, go through these places. A function in brackets concerns only some kinds.

- The plan: `How` in `types.py`; from it the text form and the plan file know the name. Its rules are in
  `rules/sync_rules.py`: `check_syncs`, and the text of `_duplicate`. `_sync_pairs` in `rules/connections.py` says which
  participants talk. (`_check_sync` in `rules/shape.py`, if it has a root.)
- Training: a class that implements `SyncMethod`, in `runtime/comm/syncs.py`, and a case in `make_sync` there. (In
  `runtime/worker.py`: `_sync`, if it is not made by `make_sync`, and `_served`, if its root may be no participant. In
  `runtime/buckets.py`: `Bucket.reduce`, if it is not given the whole gradient, or ignores the mask.)
- The price: a number in `cost/task_types.py`, and an entry in `_HOW` in `cost/plan_arrays.py`. The function that writes
  its messages goes to `cost/collectives.py`, and is called in `reduce` in `cost/bucket_tasks.py`, where every other
  number means a ring (or in `sync` there, if it does not wait for the whole gradient). `scratch_bytes` in
  `cost/memory.py` counts its memory. (`_MEASURED_AS` in `cost/plan_arrays.py` if profiles have its times, and otherwise
  the reason in `_played` in `cost/sources.py`; `_can_fold` in `cost/replicas/folding.py`, if it has a root.)
- The planners: `_ways` in `planners/syncs/sync_options.py`, which offers it for each bucket. That is enough for a
  planner to choose it. (`ways` in `planners/search/candidates.py`, and `Candidates.take` there, if layouts are to be
  searched with it. `COPIED` and `_hows` in `planners/search/large_clusters.py`, if it is to sum up the gradients of
  copies.)

`isthmus.plan` can also be called: it is the verb that finds a plan (`isthmus/__init__.py`).
"""
