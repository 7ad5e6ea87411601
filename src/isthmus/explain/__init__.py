"""Explain what limits a plan, what would help, and why devices are unused.

- `what_if.py`: a plan with its cluster, and the same plan on a cluster in which something is better.
- `group_talk.py`: what the devices of a tensor group send each other.
- `binding.py`: where the time of a step goes, and what limits it; the way in for `isthmus explain`.
- `why_unused.py`: the devices that a plan does not use, by reason.
- `link_changes.py`: better links, in steps and in words.
- `link_trials.py`: why devices are unused, and which links would make them useful, found by planning anew.
"""
