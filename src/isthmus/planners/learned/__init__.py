"""Search with the help of a network that has seen many problems.

- `decisions.py`: a setting built choice by choice, and what a prior says of choices.
- `tree_search.py`: the tree search over these choices.
- `features.py`: what the network sees of a problem.
- `network_numpy.py`: the network without torch, as planning uses it.
- `prior.py`: the prior of the network that the package ships.
- `graph_network.py`: the same network in torch, for training.
- `training/`: how it is trained.
"""
