"""How the network of `learned` is trained: `python -m isthmus.planners.learned.training`."""
