"""The parts that the rules of `rules.py` share: where rows lie after broadcasting, and in which dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from isthmus.model.samples.proof import FREE, Call, Free, Position, Rows, State, Unproven

__all__ = ["aligned", "dims_of", "moved", "one_dim"]


def aligned(call: Call, nodes: Sequence[Any], rank: int) -> State:
    """Return the state of tensors that are broadcast to `rank` dimensions and meet element by element.

    The rows of all must be those of the same samples, in the same dimension of the result; others must not depend on
    samples. A single tensor that is an index keeps its meaning only in operations that say so themselves.
    """
    found: set[Rows] = set()
    for node in nodes:
        state = call.state(node)
        if isinstance(state, Rows) and isinstance(node, fx.Node):
            found.add(state.at(state.dim + rank - call.rank_of(node)))
        elif not isinstance(state, Free):
            raise Unproven
    if any(map(call.batch_scalar, call.node.all_input_nodes)):
        raise Unproven
    if len(found) > 1:
        raise Unproven
    return found.pop() if found else FREE


def moved(state: State, dim: int) -> State:
    """Return the state of the same rows in another dimension."""
    if isinstance(state, Position):
        return Position(dim, state.per)
    if isinstance(state, Rows):
        return replace(state, dim=dim)
    raise Unproven


def one_dim(dim: int, rank: int) -> int:
    """Return a dimension counted from the front."""
    return dim % max(rank, 1)


def dims_of(given: Any, rank: int) -> list[int]:
    """Return dimensions counted from the front; if none are given, return all of them."""
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return list(range(rank))
    dims = given if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(dim, int) for dim in dims):
        raise Unproven
    return [one_dim(dim, rank) for dim in dims]
