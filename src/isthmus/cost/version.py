"""The version of the cost model.

It is raised when prices change so much that what was learned from old prices no longer holds.
"""

__all__ = ["COST_MODEL"]

COST_MODEL = 1
