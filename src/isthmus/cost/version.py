"""Which cost model this is: raised when prices change so much that what was learned from old ones no longer holds."""

__all__ = ["COST_MODEL"]

COST_MODEL = 1
