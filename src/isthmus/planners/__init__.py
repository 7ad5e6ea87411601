"""Find the fastest plan for a job on a cluster.

Files in reading order:

- `problem.py`: what is to be planned, on what; a `Problem` never changes.
- `portfolio.py`: `choose_plan`, the way in; it runs the search, and returns the fastest plan with all that it found.
- `rounds.py`: one search in rounds: all schemes, then the planner that goes beyond them.
- `schemes/`: the usual ways to train, which a planner must beat.
- `search_planners.py`: the planners that go beyond them, each as a sequence of steps.
- `layout/`: stages, lanes and shares, found exactly for given devices.
- `search/`: the search over which devices work together.
- `learned/`: the same search guided by a network.
- `syncs/`: how gradients are synchronised.
- `proposal.py`: what a scheme proposes: ideas with bounds.
- `budget.py`, `search_state.py`, `stop.py`: what one part of a search may spend; what the whole has counted; its end.
- `search_constants.py`: every constant that steers the search, with its reason.
- `warm_up.py`: compiling, or loading what was compiled before, as a step of its own.
- `lower_bound.py`: seconds that no plan can go below.
- `notes.py`: what a user should know of a plan, or of why there is none.

To add a scheme, write a function that yields ideas in a file of `schemes/`, like `schemes/fsdp.py`.
Then give it a line in `SCHEMES`, in `schemes/all_schemes.py`.

To add a planner, write a function like `split` in a file of its own (docs/planners.md has a whole one).
Then give it a line in `BEYOND`, in `search_planners.py`, which also says whether it starts from the schemes' plans and
whether the usual effort ends it.
"""
