"""Finds out whether a model keeps the samples of a batch apart, so that a plan may split the batch.

The files in reading order:

- `proof.py`: the states of tensors, and the proof that goes through the operations of a trace.
- `rules.py`: the rules for elementwise operations, views, reductions and new tensors, and the table of all rules.
- `product_rules.py`: the rules for products, convolutions, norms, attention, recurrent layers and losses.
- `index_rules.py`: the rules for tables, indices and sorts, which mixtures of experts use.
- `states.py`: what the rules have in common.
- `measured.py`: measures on random samples what nothing proves.
- `fixed_norms.py`: batch norm with fixed statistics, for these measurements.

To add a rule for an operation, write a function from a `Call` to a state beside the rules like it, and list it under
the operation's kind in `SAMPLE_RULES`, `PRODUCT_RULES` or `INDEX_RULES` at the end of that file.
"""
