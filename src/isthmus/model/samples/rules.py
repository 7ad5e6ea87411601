"""The rules by which operations are proven to keep samples apart, by kind (see `proof.py` for the states).

Every rule either gives the state of the results or raises `Unproven`. Elementwise operations are recognised by torch's
own tag; the others are listed here by what they do: view a tensor in another way, work along some dimensions, or make a
tensor of a given size. `product_rules.py` has products, convolutions and norms, `index_rules.py` has indices, sorts and
mixtures of experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from isthmus.model.samples.index_rules import INDEX_RULES, sorts_rows
from isthmus.model.samples.product_rules import PRODUCT_RULES
from isthmus.model.samples.proof import (
    Bounds,
    Call,
    Counts,
    Free,
    Listed,
    Position,
    Rows,
    Rule,
    Sorted,
    SortOrder,
    State,
    Unproven,
    nested,
    rows_per_sample,
)
from isthmus.model.samples.states import aligned, dims_of, moved, one_dim

__all__ = ["SAMPLE_RULES"]


def _pointwise(call: Call) -> State:
    """Return the state of an elementwise operation with broadcast shapes.

    Rows must meet the rows of the same samples.
    """
    return aligned(call, call.tensors, call.rank)


def _same(call: Call) -> State | list[State]:
    """Return the state of a copy, a cast or a dropout of the first argument; the draws are a function of the sample."""
    source, *others = call.tensors
    if others:
        return [aligned(call, call.tensors, call.rank)] * len(call.values)
    state = call.state(source)
    if call.value(source).dtype == call.values[0].dtype or _keeps(state, call.values[0].dtype):
        return [state] * len(call.values)
    return aligned(call, [source], call.rank)


def _keeps(state: State, dtype: torch.dtype) -> bool:
    """Return whether a cast keeps every row number: int32 and int64 do, float32 and float64 for keys below 2**24."""
    few = isinstance(state, Sorted) and state.below is not None and state.below < _EXACT
    return dtype in (torch.int32, torch.int64) or (few and dtype in (torch.float32, torch.float64))


def _item(call: Call) -> State:
    """Return the state of one of several results."""
    source, place = call.node.args
    assert isinstance(source, fx.Node) and isinstance(place, int)
    return call.states(source)[place]


# -- views of the same elements


def _reshaped(call: Call) -> State:
    """Return the state of elements in the same order under another shape.

    With P elements before the samples and K within each, an element's number is (p · batch + sample) · K + k. The
    result has rows in a dimension e of size outer · batch · per, where P = (elements before e) · outer and K = per ·
    (elements below e).
    """
    source = call.tensors[0]
    state, shape = call.state(source), call.value(source).shapes[0]
    if not isinstance(state, (Rows, Position)):
        return _unchanged(call, state, source)
    result = call.values[0]
    repeats = state.outer if isinstance(state, Rows) else 1
    before, below = math.prod(shape[: state.dim]) * repeats, state.per * math.prod(shape[state.dim + 1 :])
    for dim in result.batch_dims:
        size, times = result.shapes[0], rows_per_sample(call.trace, result, dim)
        outer, odd = divmod(before, math.prod(size[:dim]))
        per, rest = divmod(below, math.prod(size[dim + 1 :]))
        if not odd and not rest and outer * per == times:
            if isinstance(state, Position) or state.order is not None:
                return _kept(state, dim, per, outer)
            return Rows(dim, per, outer=outer, below=state.below)
    raise Unproven


def _kept(state: Rows | Position, dim: int, per: int, outer: int) -> State:
    """Return the state of rows in the order of an index, or of row numbers; both stay rows only if unchanged."""
    if per != state.per or outer != 1:
        raise Unproven
    return moved(state, dim)


def _unchanged(call: Call, state: State, source: fx.Node) -> State:
    """Return the state of an index, which keeps its meaning only in its own shape."""
    if call.values[0].shapes != call.value(source).shapes:
        raise Unproven
    return state


def _permuted(call: Call) -> State:
    """Return the state of a tensor whose dimensions come in another order."""
    source = call.tensors[0]
    rank = call.rank_of(source)
    places = list(range(rank))
    if call.kind == "permute":
        places = [dim % rank for dim in call.args["dims"]]
    elif call.kind in ("movedim", "moveaxis"):
        places = _moved_places(call, rank)
    elif call.kind in ("t", "numpy_T", "mT", "adjoint", "mH", "matrix_H"):
        places = places[::-1] if call.kind in ("t", "numpy_T") else [*places[:-2], *places[:-3:-1]]
    else:
        pairs = [call.args[name] % rank for name in call.args if name.startswith(("dim", "axis"))]
        one, other = pairs
        places[one], places[other] = places[other], places[one]
    state = call.state(source)
    if isinstance(state, (Rows, Position)):
        return moved(state, places.index(state.dim))
    return _unchanged(call, state, source)


def _moved_places(call: Call, rank: int) -> list[int]:
    source, target = (dims_of(call.args[name], rank) for name in ("source", "destination"))
    rest = iter([dim for dim in range(rank) if dim not in source])
    return [source[target.index(place)] if place in target else next(rest) for place in range(rank)]


def _unsqueezed(call: Call) -> State:
    state, dim = call.state(call.tensors[0]), call.args["dim"] % call.rank
    if not isinstance(state, (Rows, Position)):
        raise Unproven
    return moved(state, state.dim + (dim <= state.dim))


def _squeezed(call: Call) -> State:
    """Return the state after named dimensions of size 1 are removed.

    Without names a batch of one sample would lose its dimension.
    """
    source = call.tensors[0]
    state, given = call.state(source), call.args.get("dim")
    if isinstance(state, Listed):
        return state
    if not isinstance(state, (Rows, Position)) or given is None:
        raise Unproven
    dims = dims_of(given, call.rank_of(source))
    if state.dim in dims:
        raise Unproven
    gone = [dim for dim in dims if call.size(source, dim) == 1]
    return moved(state, state.dim - sum(dim < state.dim for dim in gone))


def _expanded(call: Call) -> State:
    """Return the state after dimensions of size 1 are repeated and new ones put in front.

    What is alike for all samples becomes rows.
    """
    source = call.tensors[0]
    state = call.state(source)
    if isinstance(state, Free):
        return call.grown()
    if not isinstance(state, (Rows, Position)):
        raise Unproven
    return moved(state, state.dim + call.rank - call.rank_of(source))


def _sliced(call: Call) -> State:
    """Return the state of a part of a dimension that is not the samples', or of all of the samples' dimension."""
    source = call.tensors[0]
    state, dim = call.state(source), call.args["dim"] % call.rank
    if isinstance(state, (Rows, Position)) and state.dim == dim:
        whole = call.values[0].shapes == call.value(source).shapes and _to_end(call, source)
        if not (whole and call.args.get("start") in (None, 0) and call.args.get("step", 1) == 1):
            raise Unproven
        return state
    if not isinstance(state, (Rows, Position)) or any(map(call.batch_scalar, call.node.args[1:])):
        raise Unproven
    return state


def _to_end(call: Call, source: fx.Node) -> bool:
    """Return whether a slice goes to the end at any batch size.

    Its end is then not given, beyond all tensors, or the size itself.
    """
    end = call.args.get("end")
    if end is None or (isinstance(end, int) and end >= 2**62):
        return True
    return isinstance(end, fx.Node) and call.trace.scalars.get(end) == tuple(
        shape[call.args["dim"]] for shape in call.value(source).shapes
    )


def _selected(call: Call) -> State:
    """Return the state of one place of a dimension that is not the samples'."""
    source = call.tensors[0]
    state, dim = call.state(source), call.args["dim"] % call.rank_of(source)
    if isinstance(state, Listed) and dim == 1:  # the only column of the result of `nonzero`
        return state
    if not isinstance(state, (Rows, Position)) or state.dim == dim:
        raise Unproven
    if call.batch_scalar(call.args.get("index")):
        raise Unproven
    return moved(state, state.dim - (dim < state.dim))


def _parts(call: Call) -> State | list[State]:
    """Return the states of parts along another dimension, which `unbind` removes, or of parts with all samples."""
    source = call.tensors[0]
    state, dim = call.state(source), call.args.get("dim", 0) % call.rank_of(source)
    if not isinstance(state, (Rows, Position)):
        raise Unproven
    if state.dim == dim:
        return _repeats(call, state)
    gone = call.kind == "unbind" and dim < state.dim
    return [moved(state, state.dim - gone)] * len(call.values)


def _repeats(call: Call, state: Rows | Position) -> list[State]:
    """Return the states of parts of a tensor in which all samples follow each other `outer` times.

    Each part must consist of whole turns.
    """
    times = [rows_per_sample(call.trace, value, state.dim) for value in call.values]
    if isinstance(state, Position) or state.order is not None or call.kind == "unbind" or len(times) < 2:
        raise Unproven
    if call.kind != "chunk" and not any(map(call.batch_scalar, call.node.all_input_nodes)):
        raise Unproven
    if any(count is None or count % state.per for count in times):
        raise Unproven
    return [replace(state, outer=count // state.per) for count in times if count is not None]


def _complex(call: Call) -> State:
    """Return the state after a last dimension of two reals becomes a complex number, or the other way round."""
    source = call.tensors[0]
    state = call.rows(source)
    if call.kind == "view_as_complex" and state.dim == call.rank_of(source) - 1:
        raise Unproven
    return moved(state, state.dim)


def _diagonal(call: Call) -> State:
    source, state = call.tensors[0], call.rows(call.tensors[0])
    rank = call.rank_of(source)
    dims = [call.args[name] % rank for name in ("dim1", "dim2")]
    if state.dim in dims:
        raise Unproven
    return moved(state, state.dim - sum(dim < state.dim for dim in dims))


def _windows(call: Call) -> State:
    """Return the state of `unfold`: windows along another dimension, in a new last one."""
    state = call.rows(call.tensors[0])
    if call.args["dimension"] % call.rank_of(call.tensors[0]) == state.dim:
        raise Unproven
    return state


def _joined(call: Call) -> State:
    """Return the state of tensors one after the other.

    They are joined along another dimension, or all samples of one follow all samples of the other.
    """
    dim, tensors = call.args["dim"] % call.rank, call.args["tensors"]
    states = [call.rows(tensor) for tensor in tensors]
    if len({state.at(state.dim) for state in states}) == 1 and states[0].dim != dim:
        return states[0].at(states[0].dim)
    if any(state != Rows(dim, states[0].per, outer=state.outer, below=state.below) for state in states):
        raise Unproven
    return Rows(dim, states[0].per, outer=sum(state.outer for state in states))


def _stacked(call: Call) -> State:
    """Return the state of tensors side by side in a new dimension."""
    dim = call.args["dim"] % call.rank
    state = aligned(call, call.args["tensors"], call.rank - 1)
    if not isinstance(state, Rows) or any(isinstance(call.state(t), Free) for t in call.args["tensors"]):
        raise Unproven
    return moved(state, state.dim + (dim <= state.dim))


def _repeated(call: Call) -> State:
    """Return the state of tiles along other dimensions.

    Tiles of what is alike for all samples are rows, one tile for each sample.
    """
    source, times = call.tensors[0], list(call.args.get("repeats") or call.args["dims"])
    state = call.state(source)
    if isinstance(state, Free):
        return call.grown()
    state = call.rows(source)
    dim = state.dim + call.rank - call.rank_of(source)
    own = dim - (call.rank - len(times))
    if (own >= 0 and times[own] != 1) or any(map(call.batch_scalar, times)):
        raise Unproven
    return moved(state, dim)


def _interleaved(call: Call) -> State:
    """Return the state of `repeat_interleave`: each row n times in succession."""
    source, times, dim = call.tensors[0], call.args.get("repeats"), call.args.get("dim")
    state = call.rows(source)
    if not isinstance(times, int) or dim is None or state.order is not None:
        raise Unproven
    return replace(state, per=state.per * times) if dim % call.rank == state.dim else state


def _padded(call: Call) -> State:
    """Return the state after padding along the last dimensions, of which none is the samples'."""
    state = call.rows(call.tensors[0])
    if any(map(call.batch_scalar, call.args["pad"])) or call.batch_scalar(call.args.get("value")):
        raise Unproven
    first = call.rank - len(call.args["pad"]) // 2
    if state.dim >= first and any(call.args["pad"][2 * (call.rank - 1 - state.dim) :][:2]):
        raise Unproven
    return moved(state, state.dim)


# -- along dimensions


def _along(call: Call, *, name: str = "dim", default: Any = -1) -> State | list[State]:
    """Return the state of work along dimensions that must not be the samples'.

    The results have the dimensions of the argument.
    """
    if special := sorts_rows(call):
        return special
    source = call.tensors[0]
    if isinstance(state := call.state(source), Counts) and call.kind == "cumsum":
        return Bounds(state.sort, state.groups)
    given = call.args.get(name, default)
    state = aligned(call, call.tensors, call.rank)
    if not isinstance(state, Rows) or state.dim in dims_of(given, call.rank_of(source)):
        raise Unproven
    indices = replace(state, below=_limit(call, source, given))
    if call.kind in ("topk", "sort"):
        return [state, indices]
    return indices if call.kind == "argsort" else [state] * len(call.values)


def _limit(call: Call, source: fx.Node, dim: Any) -> int | None:
    """Return the size of a dimension, which indices of it are below, or None if it is not known."""
    return call.size(source, one_dim(dim, call.rank_of(source))) if isinstance(dim, int) else None


def _reduced(call: Call) -> State | list[State]:
    """Return the state of a reduction over dimensions that must not be the samples'."""
    source, given = call.tensors[0], call.args.get("dim", call.args.get("axis"))
    state, rank = aligned(call, call.tensors, call.rank_of(source)), call.rank_of(source)
    if not isinstance(state, Rows) or given in (None, []):
        raise Unproven
    dims = dims_of(given, rank)
    if state.dim in dims:
        raise Unproven
    kept = bool(call.args.get("keepdim", False))
    dim = state.dim if kept else state.dim - sum(d < state.dim for d in dims)
    values = state.at(dim)
    indices = replace(values, below=_limit(call, source, given))
    if call.kind in ("argmax", "argmin"):
        return indices
    return [values, indices] if len(call.values) == 2 and call.kind in _WITH_INDICES else [values] * len(call.values)


def _below(call: Call, *, last: int) -> State:
    """Return the state of work on the last dimensions, which must not be the samples'."""
    state = call.rows(call.tensors[0])
    call.free(*call.tensors[1:])
    if state.dim >= call.rank_of(call.tensors[0]) - last or any(map(call.batch_scalar, call.node.all_input_nodes)):
        raise Unproven
    return moved(state, state.dim)


def _shuffled(call: Call) -> State:
    """Return the state of channels, in dimension 1, in another order; samples come first."""
    state = call.rows(call.tensors[0])
    if state.dim != 0:
        raise Unproven
    return moved(state, 0)


# -- new tensors


def _made(call: Call) -> State:
    """Return the state of a new tensor of a given size, which is alike for all samples or drawn for each of them."""
    others = [value for name, value in call.args.items() if name not in ("self", "size", "input")]
    if any(call.batch_scalar(value) or not isinstance(call.state(value), Free) for value in others):
        raise Unproven
    return call.grown()


def _counted(call: Call) -> State:
    """Return the state of `arange`: numbers that do not depend on the batch, or the number of each row."""
    first, step = call.args.get("start", 0), call.args.get("step", 1)
    if first != 0 or step != 1:
        raise Unproven
    state = call.grown()
    return Position(state.dim, state.per) if isinstance(state, Rows) else state


def _one_hot(call: Call) -> State:
    state = call.rows(call.tensors[0])
    if not isinstance(call.args.get("num_classes"), int) or call.args["num_classes"] < 0:
        raise Unproven  # as many classes as the batch has
    return moved(state, state.dim)


def _share(call: Call) -> State:
    """Return the state of `floor_divide`.

    It may divide the rows that stand in each place of a sort, which takes copies of rows to the rows.
    """
    source, by = call.node.args[:2]
    state = call.state(source)
    if isinstance(state, SortOrder) and isinstance(by, int) and by > 0 and state.per % (state.share * by) == 0:
        return SortOrder(state.sort, state.per, state.share * by)
    return _pointwise(call)


def _histogram(call: Call) -> State:
    """Return the state of counts of keys 0, 1, ..., n - 1: `histc` with n bins from 0 to n - 1, or `bincount`."""
    state = call.state(call.tensors[0])
    if not isinstance(state, Sorted) or state.below is None or call.args.get("weights") is not None:
        raise Unproven
    if call.kind == "bincount":
        groups = call.args["minlength"]
        fits = groups >= state.below
    else:
        groups, low, high = (call.args[name] for name in ("bins", "min", "max"))
        fits = low == 0 and high == groups - 1 and groups >= max(2, state.below)
    if not fits:
        raise Unproven
    return Counts(state.sort, int(groups))


def _region(call: Call) -> list[State]:
    """Return the states of a nested graph: a region without gradients, or in another precision."""
    graphs = [node for node in call.node.args if isinstance(node, fx.Node) and node.op == "get_attr"]
    content = call.trace.attributes[graphs[0]].content
    place = call.node.args.index(graphs[0])
    return nested(call, content, call.node.args[place + 1 :], SAMPLE_RULES)


def _table(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_EXACT = 2**24  # integers below it are exact in fp32
_WITH_INDICES = {"max", "min", "median", "nanmedian", "mode", "kthvalue"}
_ELEMENTWISE = """pointwise where __and__ __or__ __xor__ true_divide divide multiply subtract square clip selu relu6
    celu float_power logical_and logical_or logical_xor masked_fill fill fill_ zero zero_ copy copy_ rsub hardswish
    type_as isfinite isreal log_sigmoid bernoulli bucketize isclose arctan2 negative absolute ldexp lerp
    addcmul addcdiv"""
_SAME = """contiguous clone detach alias to _to_copy float double half bfloat16 int long bool dropout feature_dropout
    alpha_dropout feature_alpha_dropout native_dropout requires_grad_ lift_fresh lift_fresh_copy positive real imag
    conj resolve_conj resolve_neg normal uniform exponential"""
_RESHAPES = "view _unsafe_view reshape flatten unflatten ravel view_as reshape_as"
_PERMUTES = "permute transpose t numpy_T mT adjoint mH matrix_H movedim moveaxis swapaxes swapdims"
_REDUCTIONS = """sum mean amax amin max min argmax argmin prod var std var_mean std_mean logsumexp norm all any median
    nanmedian mode nansum nanmean count_nonzero linalg_vector_norm linalg_norm linalg_matrix_norm
    cosine_similarity kthvalue"""
_ALONG = """softmax _softmax log_softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort topk glu
    diff fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn
    fft_ifftn fft_rfftn fft_irfftn"""
_MAKERS = "zeros ones full empty rand randn randint new_zeros new_ones new_full new_empty scalar_tensor"
_LIKES = "zeros_like ones_like full_like empty_like rand_like randn_like randint_like"
_POOLS = "max_pool{n}d avg_pool{n}d adaptive_avg_pool{n}d adaptive_max_pool{n}d max_pool{n}d_with_indices lp_pool{n}d"
_SPREADS = "upsample_nearest{n}d _upsample_nearest_exact{n}d reflection_pad{n}d replication_pad{n}d"


def _spatial() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for n in (1, 2, 3):
        found |= _table(partial(_below, last=n), f"{_POOLS} {_SPREADS}".format(n=n))
    found |= _table(partial(_below, last=1), "upsample_linear1d")
    found |= _table(partial(_below, last=2), "upsample_bilinear2d upsample_bicubic2d tril triu im2col col2im")
    found |= _table(partial(_below, last=3), "pixel_shuffle pixel_unshuffle upsample_trilinear3d")
    return found


SAMPLE_RULES: Mapping[str, Rule] = {
    **_table(_pointwise, _ELEMENTWISE),
    **_table(_same, _SAME),
    **_table(_reshaped, _RESHAPES),
    **_table(_permuted, _PERMUTES),
    **_table(_reduced, _REDUCTIONS),
    **_table(_along, _ALONG),
    **_table(partial(_along, name="dims", default=()), "flip roll"),
    **_table(_made, _MAKERS),
    **_table(_made, _LIKES),
    **_table(_expanded, "expand expand_as broadcast_to"),
    **_table(_parts, "split split_with_sizes chunk tensor_split unbind unsafe_split unsafe_chunk"),
    **_table(_repeated, "repeat tile"),
    **_table(_region, "wrap_with_set_grad_enabled wrap_with_autocast"),
    **_table(_histogram, "histc bincount"),
    "getitem": _item,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "slice": _sliced,
    "narrow": _sliced,
    "select": _selected,
    "diagonal": _diagonal,
    "unfold": _windows,
    "cat": _joined,
    "concat": _joined,
    "stack": _stacked,
    "repeat_interleave": _interleaved,
    "pad": _padded,
    "constant_pad_nd": _padded,
    "arange": _counted,
    "one_hot": _one_hot,
    "floor_divide": _share,
    "channel_shuffle": _shuffled,
    "view_as_complex": _complex,
    "view_as_real": _complex,
    **_spatial(),
    **PRODUCT_RULES,
    **INDEX_RULES,
}
