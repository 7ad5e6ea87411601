"""Random numbers in training that depend on seed, step, sample and operation, and not on the plan or the device.

Read the files in this order:

- `draws.py`: the random operations of a block, and along which dimension the samples lie in what they draw.
- `randomness.py`: replaces what the device would draw while a block runs.
- `hashed.py`: the numbers themselves, each a hash of a key and of its place.
- `plain_attention.py`: attention whose dropout is an operation of its own.

To support another random operation, add its name to `_KNOWN` in `draws.py` and a function to `_RULES` in
`randomness.py`.
"""
