"""Search over which devices work together, in what way.

- `moves.py`: settings, and the small changes of settings and of finished layouts.
- `candidates.py`: what a search has tried, and the best of it.
- `local_search.py`: settings first, then changes of the best as long as one gains.
- `finishing.py`, `duplicates.py`: what a layout leaves open: blocks computed by all replicas, and slices.
- `exact_enumeration.py`, `exact.py`: all forms of layouts with their bounds, and branch and bound over them.
- `large_clusters.py`: large clusters planned as copies of a small one.
"""
