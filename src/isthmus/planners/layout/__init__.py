"""Find exactly what given devices do: stages, cuts, shares, memory, and the plan made of them.

- `layout_types.py`: bundles, stages, lanes and layouts as types.
- `device_groups.py`: tensor groups and bundles of devices, and the orders in which they may follow each other.
- `memory_fit.py`: which blocks fit in the memory of which stage.
- `shares.py`, `stage_shares.py`: samples divided so that all finish together; the same inside a stage.
- `cuts.py`: the best cut of blocks into stages, and the seconds of a pipeline that is cut.
- `build_plan.py`: plans and syncs made of stages, and the least that syncs and updates take.
- `pipeline_bounds.py`: bounds and estimates of the seconds of a pipeline.
- `stage_tables.py`: times and memory of every run of bundles, as rows for the next file.
- `stage_dp.py`: the dynamic programme that makes stages of bundles and gives blocks to them.
- `side_by_side.py`: lanes side by side: the form that all plans of one job have.
"""
