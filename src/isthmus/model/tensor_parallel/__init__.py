"""Divides blocks over the members of a tensor group, Megatron style (Shoeybi et al., 2019).

The files in reading order:

- `linear_pairs.py`: finds the pairs of linear layers that can be split.
- `division_rules.py`: rules for how a divided tensor stays divided through operations.
- `divide_pair.py`: works out how a pair and everything between its layers is divided.
- `member_slices.py`: the slice of a parameter that a member holds.
- `crossing.py`: the modules through which a tensor enters or leaves a divided part.
- `member_blocks.py`: makes the blocks of one member.
- `check_division.py`: checks the shapes of a member's blocks without data.

To let an operation work on divided tensors, add its kind to a set at the top of `division_rules.py`, or a rule to
`Rules._rule`, and let `linear_pairs.py` pass through it (`_POINTWISE` or `_PER_HEAD`).
"""
