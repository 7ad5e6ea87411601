"""Pricing of large plans that consist of copies of a smaller plan: a few of the copies stand for all of them.

In reading order:

- `folding.py`: finds the copies in a plan, and says what is exact about their price.
- `folded_network.py`: the network of the copies that are kept.

A plan that cannot be folded is priced whole. To make another kind of plan foldable, start at `_can_fold` and
`Folder.fold` in `folding.py`.
"""
