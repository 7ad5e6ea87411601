"""Rules for tables, indices and sorts: rows may be picked and put back if no other sample changes what comes back.

A mixture of experts sorts the rows of all samples by expert, multiplies, and puts them back. It keeps samples apart if

1. the order is a permutation (`SortOrder`), and rows are picked by it: row i of the result then belongs to the sample
   of row order[i] (`Rows.order`);
2. what happens to the rows in between is the same for every row, or depends only on the row's own key: groups end where
   the sorted keys say (`Bounds`);
3. they are put back by the inverse permutation of the same sort (`Inverse`).

A mask that is decided row by row may also list some rows (`Listed`), and a scatter by the same list puts them back. A
list that is cut, to a capacity for example, depends on the other samples, and no rule accepts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from isthmus.model.samples.proof import (
    Bounds,
    Call,
    Free,
    Inverse,
    Listed,
    Position,
    Rows,
    Rule,
    Sorted,
    SortOrder,
    State,
    Unproven,
)
from isthmus.model.samples.states import aligned, moved
from isthmus.model.trace import kind_of

__all__ = ["INDEX_RULES", "sorts_rows"]


def _looked_up(call: Call) -> State:
    """Return the state of rows of a table that depends on no sample.

    The gradients of the table must not depend on how often the batch has a number either.
    """
    call.free(call.args["weight"])
    if call.args.get("scale_grad_by_freq"):
        raise Unproven
    state = call.rows(call.args["indices"])
    return state.at(state.dim)


def _indexed(call: Call) -> State:
    """Return the state of `x[i, j, :]`.

    The index tensors are broadcast to one shape, which stands where the first of them stood.
    """
    source, given = call.args["self"], call.args["indices"]
    return _picked(call, source, list(given))


def _picked(call: Call, source: fx.Node, given: list[Any]) -> State:
    state, places = call.state(source), [place for place, index in enumerate(given) if index is not None]
    indices = [given[place] for place in places]
    if any(call.value(index).dtype.itemsize == 1 for index in indices):
        return _masked(call, state, given)
    rank = max(call.rank_of(index) for index in indices)
    apart = places != list(range(places[0], places[0] + len(places)))
    at = 0 if apart else places[0]
    if isinstance(state, Free):
        joint = aligned(call, indices, rank)
        return joint.at(joint.dim + at) if isinstance(joint, Rows) else joint
    if not isinstance(state, Rows):
        raise Unproven
    if state.dim in places:
        return _rows_picked(call, state, given, rank, at)
    call.free(*indices)
    before = sum(place < state.dim for place in places)
    dim = state.dim - before + (rank if apart or places[0] < state.dim else 0)
    return moved(state, dim)


def _rows_picked(call: Call, state: Rows, given: list[Any], rank: int, at: int) -> State:
    """Return the state after the samples' own dimension is indexed.

    The index is the row's own number, the order of a sort, the way back from it, or a list.
    """
    index = given[state.dim]
    if state.outer != 1:
        raise Unproven
    others = [other for other in given if other is not None and other is not index]
    by = call.state(index)
    found: Rows
    if isinstance(by, Position) and by.per == state.per and state.order is None:
        found = Rows(by.dim + rank - call.rank_of(index), by.per)
    elif isinstance(by, SortOrder) and state.order is None and state.per * by.share == by.per and rank == 1:
        found = Rows(0, by.per, by.sort)
    elif isinstance(by, Inverse) and state.order is by.sort and rank == 1:
        found = Rows(0, by.per)
    elif isinstance(by, Listed) and state.order is None and by.per == state.per and rank == 1:
        found = Rows(0, 1, by.mask)
    else:
        raise Unproven
    for other in others:
        beside = call.state(other)
        own = beside.at(beside.dim + rank - call.rank_of(other)) if isinstance(beside, Rows) else None
        if not isinstance(beside, Free) and own != found:
            raise Unproven
    return found.at(found.dim + at)


def _masked(call: Call, state: State, given: list[Any]) -> State:
    """Return the state of the rows that a mask picks, if the mask is decided row by row."""
    mask, by = given[0], call.state(given[0])
    fits = len(given) == 1 and isinstance(state, Rows) and isinstance(by, Rows) and call.rank_of(mask) == 1
    if not fits or by != Rows(0, state.per) or state.dim != 0 or state.order is not None:  # type: ignore[union-attr]
        raise Unproven
    return Rows(0, 1, mask)


def _selected_rows(call: Call) -> State:
    """Return the state of `index_select`, which is an index in one dimension."""
    source = call.args["self"]
    given: list[Any] = [None] * (call.args["dim"] % call.rank_of(source))
    return _picked(call, source, [*given, call.args["index"]])


def _gathered(call: Call) -> State:
    """Return the state of a gather along a dimension that is not the samples'.

    Argument and index must have the same rows.
    """
    source, index = call.args["self"], call.args["index"] if "index" in call.args else call.args["indices"]
    state = call.rows(source)
    if state.at(state.dim) != _plain(call, index):
        raise Unproven
    if call.args["dim"] is None or call.args["dim"] % call.rank == state.dim:
        raise Unproven
    return state.at(state.dim)


def _plain(call: Call, node: Any) -> State:
    return _bare(call.state(node))


def _scattered(call: Call) -> State:
    """Return the state of a scatter along a dimension that is not the samples'.

    All arguments must have the same rows.
    """
    state = call.rows(call.args["self"])
    own = state.at(state.dim)
    source = call.args.get("src")
    if _plain(call, call.args["index"]) != own or call.args["dim"] % call.rank == state.dim:
        raise Unproven
    if isinstance(source, fx.Node) and _plain(call, source) != own:
        raise Unproven
    if call.batch_scalar(call.args.get("value")):
        raise Unproven
    return own


def _put(call: Call) -> State:
    """Return the state of `x[i] = v`.

    The index is a list of rows, the row's own number, or a sort's order; the last needs newly made memory.
    """
    source, given, values = call.args["self"], list(call.args["indices"]), call.args["values"]
    if (inverse := _inverse(call, source, given, values)) is not None:
        return inverse
    target = call.rows(source)
    state, written = _picked(call, source, given), call.state(values)
    if isinstance(written, Free):
        if call.rank_of(values) > 0 and isinstance(state, Rows):
            size = call.rank_of(values) + state.dim - _picked_rank(call, source, given)
            if size >= 0 and call.size(values, size) != 1:
                raise Unproven
    else:
        other = call.rows(values)
        shifted = other.at(other.dim + _picked_rank(call, source, given) - call.rank_of(values))
        if shifted != _bare(state):
            raise Unproven
    return target.at(target.dim)


def _bare(state: State) -> State:
    return state.at(state.dim) if isinstance(state, Rows) else state


def _picked_rank(call: Call, source: fx.Node, given: list[Any]) -> int:
    indices = [index for index in given if index is not None]
    return call.rank_of(source) - len(indices) + max(call.rank_of(index) for index in indices)


def _inverse(call: Call, source: fx.Node, given: list[Any], values: fx.Node) -> State | None:
    """Return the state of `place[order] = arange(n)`: as the order is a permutation, every place is written."""
    order, numbers = call.state(given[0]), call.state(values)
    if not (len(given) == 1 and isinstance(order, SortOrder) and isinstance(numbers, Position)):
        return None
    fits = order.share == 1 and numbers == Position(0, order.per) and call.args.get("accumulate") in (False, None)
    if not fits or kind_of(source.target) not in ("empty_like", "zeros_like", "empty", "zeros"):
        raise Unproven
    return Inverse(order.sort, order.per)


def _added_rows(call: Call) -> State:
    """Return the state of `index_add` or `index_copy`: rows are put back to where the same list took them from."""
    target, source = call.rows(call.args["self"]), call.rows(call.args["source"])
    by = call.state(call.args["index"])
    if call.args["dim"] % call.rank != target.dim:
        call.free(call.args["index"])
        if _bare(source) != _bare(target):
            raise Unproven
        return target.at(target.dim)
    if not isinstance(by, Listed) or target != Rows(target.dim, by.per, below=target.below):
        raise Unproven
    if source.order is not by.mask or source.dim != target.dim:
        raise Unproven
    return Rows(target.dim, target.per)


def _listed(call: Call) -> State | list[State]:
    """Return the states of `nonzero` of a mask that is decided row by row.

    Its results are the numbers of the rows, and places within them.
    """
    source = call.tensors[0]
    state, rank = call.rows(source), call.rank_of(source)
    if state.order is not None or state.outer != 1:
        raise Unproven
    if len(call.values) == rank and call.rank == 1:
        columns: list[State] = [Rows(0, 1, call.node)] * rank
        columns[state.dim] = Listed(call.node, state.per)
        return columns
    if rank == 1:  # [rows, 1]
        return Listed(call.node, state.per)
    raise Unproven


def _where(call: Call) -> State | list[State]:
    """Return the state of `where`: with a condition alone it is `nonzero`; else it works element by element."""
    if len(call.node.args) == 1:
        return _listed(call)
    return aligned(call, call.tensors, call.rank)


def _searched(call: Call) -> State:
    """Return the state of `searchsorted`.

    It works element by element in a table that depends on no sample, or finds where the groups of sorted keys end.
    """
    table, values = call.args.get("sorted_sequence"), call.args.get("self")
    state = call.state(table)
    if isinstance(state, Free):
        return aligned(call, [values], call.rank)
    right = call.args.get("right") or call.args.get("side") == "right"
    if not isinstance(state, Sorted) or not right or state.below is None or not isinstance(values, fx.Node):
        raise Unproven
    groups = call.size(values, 0)
    counted = kind_of(values.target) == "arange" and call.rank_of(values) == 1 and isinstance(call.state(values), Free)
    if not counted or groups is None or groups < state.below or not _from_zero(call, values):
        raise Unproven
    return Bounds(state.sort, groups)


def _from_zero(call: Call, values: fx.Node) -> bool:
    given = Call(call.trace, call.samples, values, call.trace.values[values]).args
    return bool(given.get("start", 0) == 0 and given.get("step", 1) == 1)


def sorts_rows(call: Call) -> State | list[State] | None:
    """Return the state of a sort of all rows by a key of each, or of a sort of an order, which gives its inverse.

    Return None for any other operation.
    """
    if call.kind not in ("sort", "argsort") or len(call.tensors) != 1:
        return None
    state = call.state(call.tensors[0])
    if isinstance(state, SortOrder):
        if call.kind == "sort" or call.args.get("descending") or state.share != 1:
            raise Unproven
        return Inverse(state.sort, state.per)
    if call.rank_of(call.tensors[0]) != 1 or not isinstance(state, Rows) or state.order is not None or state.outer != 1:
        return None
    if call.args.get("descending"):
        raise Unproven
    order = SortOrder(call.node, state.per)
    return order if call.kind == "argsort" else [Sorted(call.node, state.per, state.below), order]


def _each(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


INDEX_RULES: Mapping[str, Rule] = {
    **_each(_gathered, "gather take_along_dim"),
    **_each(_scattered, "scatter scatter_add scatter_reduce"),
    **_each(_put, "index_put _index_put_impl"),
    **_each(_added_rows, "index_add index_copy"),
    **_each(_listed, "nonzero nonzero_numpy"),
    "embedding": _looked_up,
    "index": _indexed,
    "index_select": _selected_rows,
    "where": _where,
    "searchsorted": _searched,
}
