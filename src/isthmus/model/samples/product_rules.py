"""Rules for products, convolutions, norms, attention, recurrent layers and losses: how they keep samples apart.

In a product the samples may lie in a dimension that the result keeps and that all factors with samples have in common,
or in a dimension of one factor alone while the others depend on no sample; never in one that is summed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import fx

from isthmus.model.samples.proof import Bounds, Call, Free, Rows, Rule, State, Unproven
from isthmus.model.samples.states import aligned, moved

__all__ = ["PRODUCT_RULES"]


def _linear(call: Call) -> State:
    """Return the state of rows times a matrix that depends on no sample."""
    source, *others = call.tensors
    state = call.rows(source)
    call.free(*others)
    if source is not call.node.args[0] or state.dim == call.rank_of(source) - 1:
        raise Unproven
    return moved(state, state.dim)


def _product(call: Call, a: fx.Node, b: fx.Node) -> State:
    """Return the state of a [..., n, k] · b [..., k, m], whose leading dimensions are broadcast.

    The samples' dimension may be n if b depends on no sample, or m if a depends on none.
    """
    left, right, rank = call.state(a), call.state(b), call.rank
    ranks = call.rank_of(a), call.rank_of(b)
    if min(ranks) < 2 or rank != max(ranks):
        raise Unproven
    found: set[Rows] = set()
    for state, own, inner in ((left, ranks[0], -1), (right, ranks[1], -2)):
        if isinstance(state, Free):
            continue
        if not isinstance(state, Rows) or state.dim == own + inner:
            raise Unproven
        outer = state.dim >= own - 2
        if outer and not (isinstance(left, Free) or isinstance(right, Free)):
            raise Unproven
        found.add(state.at(state.dim + rank - own))
    if len(found) != 1:
        raise Unproven
    return found.pop()


def _matmul(call: Call) -> State:
    a, b = call.node.args[:2]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    if call.rank_of(b) == 1:  # a matrix times a vector that depends on no sample
        call.free(b)
        state = call.rows(a)
        if state.dim == call.rank_of(a) - 1:
            raise Unproven
        return moved(state, state.dim)
    return _product(call, a, b)


def _added_product(call: Call, names: tuple[str, str]) -> State:
    """Return the state of bias + a · b."""
    state = _product(call, *(call.args[name] for name in names))
    bias = call.args["self"]
    other = call.state(bias)
    if isinstance(other, Free):
        return state
    shifted = call.rows(bias)
    if shifted.at(shifted.dim + call.rank - call.rank_of(bias)) != state:
        raise Unproven
    return state


def _einsum(call: Call) -> State:
    """Return the state of an einsum: all factors with samples have them under one letter, and the result keeps it."""
    inputs, output = str(call.args["equation"]).replace(" ", "").split("->")
    tensors = call.args["tensors"]
    terms = list(zip(inputs.split(","), tensors, strict=True))
    dots = max((call.rank_of(tensor) - len(term) + 3 for term, tensor in terms if "..." in term), default=0)
    found = set()
    for term, tensor in terms:
        letters = _letters(term, call.rank_of(tensor) - len(term) + 3, dots)
        if isinstance(call.state(tensor), Free):
            continue
        rows = call.rows(tensor)
        letter = letters[rows.dim]
        found.add((letter, rows.at(0)))
        if letters.count(letter) > 1:
            raise Unproven
    if len(found) != 1:
        raise Unproven
    letter, rows = found.pop()
    places = _letters(output, dots, dots)
    if places.count(letter) != 1:
        raise Unproven
    return rows.at(places.index(letter))


def _letters(term: str, dots: int, most: int) -> list[str]:
    """Return one name for each dimension; those of `...` are counted from the last, as shapes are broadcast."""
    before, ellipsis, after = term.partition("...")
    middle = [str(number) for number in range(most - dots, most)] if ellipsis else []
    return [*before, *middle, *after]


def _convolution(call: Call) -> State:
    """Return the state of a convolution: samples lie first, and weights depend on none.

    Without a batch the first dimension would be channels.
    """
    source, weight = call.args["input"], call.args["weight"]
    state = call.rows(source)
    call.free(*[node for node in call.tensors if node is not source])
    if state.dim != 0 or call.rank_of(source) != call.rank_of(weight):
        raise Unproven
    return state.at(0)


def _normed(call: Call) -> list[State]:
    """Return the states of a layer or RMS norm, which works over the last dimensions."""
    source = call.tensors[0]
    state = call.rows(source)
    call.free(*call.tensors[1:])
    if state.dim >= call.rank_of(source) - len(call.args["normalized_shape"]):
        raise Unproven
    return [moved(state, state.dim)] * len(call.values)


def _group_norm(call: Call) -> State:
    """Return the state of a group norm, which works over the channels and places of a sample."""
    state = call.rows(call.tensors[0])
    call.free(*call.tensors[1:])
    if state.dim != 0:
        raise Unproven
    return moved(state, 0)


def _instance_norm(call: Call) -> State:
    """Return the state of an instance norm, which is that of a group norm.

    Running statistics are refused: they would be those of a part of the batch.
    """
    if call.args.get("running_mean") is not None:
        raise Unproven
    return _group_norm(call)


def _batch_norm(call: Call) -> list[State]:
    """Return the states of a batch norm.

    In training it mixes samples in a way that replicas can make whole again (`runtime/batch_statistics.py`).
    """
    state = call.rows(call.tensors[0])
    call.free(*call.tensors[1:])
    if state.dim != 0 or state.order is not None or state.outer != 1:
        raise Unproven
    return [moved(state, 0), *[_STATISTICS] * (len(call.values) - 1)]


_STATISTICS = Free()  # nothing may read them: `runtime/batch_statistics.py` refuses a model that does


def _attention(call: Call) -> State:
    """Return the state of attention.

    Batch and heads come first, and positions attend to positions of the same sample.
    """
    nodes = [call.args[name] for name in ("query", "key", "value")]
    last = 3 if call.args.get("enable_gqa") else 2  # several heads of queries then share a head of keys
    for node in nodes:
        state = call.state(node)
        if isinstance(state, Rows) and state.dim >= call.rank_of(node) - last:
            raise Unproven
    mask = call.args.get("attn_mask")
    if isinstance(mask, fx.Node):
        state = call.state(mask)
        if isinstance(state, Rows) and state.dim >= call.rank_of(mask) - last:
            raise Unproven
        nodes.append(mask)
    state = aligned(call, nodes, call.rank)
    if not isinstance(state, Rows):
        raise Unproven
    return state


def _recurrent(call: Call) -> list[State]:
    """Return the states of a GRU, LSTM or RNN over positions; hidden states have their samples in dimension 1."""
    given: list[Any] = list(call.node.args)
    source, first = given[0], bool(given[8])
    hidden = given[1] if isinstance(given[1], (list, tuple)) else [given[1]]
    state = call.rows(source)
    if call.rank_of(source) != 3 or state.dim != (0 if first else 1):
        raise Unproven
    inner = state.at(1)
    if any(call.state(node) not in (inner, Free()) for node in hidden):
        raise Unproven
    call.free(*given[2])
    return [state.at(state.dim), *[inner] * (len(call.values) - 1)]


def _cell(call: Call) -> list[State]:
    """Return the states of one step of a recurrent layer: samples come first in the input and in the hidden states."""
    given: list[Any] = list(call.node.args)
    source, before, *weights = given
    hidden = before if isinstance(before, (list, tuple)) else [before]
    state = call.rows(source)
    if call.rank_of(source) != 2 or state.dim != 0:
        raise Unproven
    if any(call.state(node) not in (state.at(0), Free()) for node in hidden):
        raise Unproven
    call.free(*weights)
    return [state.at(0)] * len(call.values)


def _bilinear(call: Call) -> State:
    """Return the state of two rows of the same samples, times a weight that depends on none."""
    one, other, *weights = call.tensors
    state = aligned(call, [one, other], call.rank_of(one))
    call.free(*weights)
    if call.rank_of(one) != call.rank_of(other) or not isinstance(state, Rows) or state.dim == call.rank - 1:
        raise Unproven
    return state


def _loss(call: Call, *, dims: int) -> State:
    """Return the state of a loss in which nothing is summed or averaged.

    It works element by element, or with classes in dimension 1 (`dims` 1).
    """
    if call.args.get("reduction", 1) != 0:
        raise Unproven
    nodes = [call.args[name] for name in ("self", "input", "target") if isinstance(call.args.get(name), fx.Node)]
    states = [call.rows(node) for node in nodes if not isinstance(call.state(node), Free)]
    if dims == 0:
        return aligned(call, call.tensors, call.rank)
    call.free(*[node for node in call.tensors if node not in nodes])
    if len(states) != 2 or len({state.at(state.dim) for state in states}) != 1 or states[0].dim != 0:
        raise Unproven
    return states[0].at(0)


def _distances(call: Call) -> State:
    """Return the state of distances between all pairs of rows within a leading dimension."""
    for node in call.tensors:
        state = call.state(node)
        if isinstance(state, Rows) and state.dim >= call.rank_of(node) - 2:
            raise Unproven
    return aligned(call, call.tensors, call.rank)


def _pairwise(call: Call) -> State:
    """Return the state of distances between rows with the same number, over the last dimension."""
    rank = max(map(call.rank_of, call.tensors))
    state = aligned(call, call.tensors, rank)
    if not isinstance(state, Rows) or state.dim == rank - 1:
        raise Unproven
    return state


def _leaky(call: Call) -> State:
    """Return the state of `prelu`, which has one weight, or one for each place of dimension 1."""
    source, weight = call.tensors
    state = call.rows(source)
    call.free(weight)
    if state.dim != 0:
        raise Unproven
    return moved(state, 0)


def _grouped(call: Call) -> State:
    """Return the state of sorted rows, each times the matrix of its own key.

    Groups end where the sorted keys say.
    """
    rows, weights, offsets = call.tensors[:3]
    state, ends = call.rows(rows), call.state(offsets)
    call.free(weights)
    if not isinstance(ends, Bounds) or state.order is not ends.sort or state.dim != 0:
        raise Unproven
    if call.size(weights, 0) != ends.groups or call.rank_of(rows) != 2:
        raise Unproven
    return moved(state, 0)


def _each(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


PRODUCT_RULES: Mapping[str, Rule] = {
    **_each(_matmul, "matmul mm bmm"),
    **_each(_convolution, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"),
    **_each(_normed, "layer_norm native_layer_norm rms_norm _fused_rms_norm"),
    **_each(_batch_norm, "batch_norm native_batch_norm"),
    **_each(_recurrent, "gru rnn_tanh rnn_relu lstm"),
    **_each(partial(_loss, dims=1), "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d"),
    **_each(partial(_loss, dims=0), "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div"),
    **_each(partial(_loss, dims=0), "binary_cross_entropy_with_logits"),
    **_each(_grouped, "grouped_mm grouped_mm_fallback _grouped_mm"),
    **_each(_cell, "gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell"),
    "bilinear": _bilinear,
    "linear": _linear,
    "addmm": partial(_added_product, names=("mat1", "mat2")),
    "baddbmm": partial(_added_product, names=("batch1", "batch2")),
    "einsum": _einsum,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "scaled_dot_product_attention": _attention,
    "cdist": _distances,
    "pairwise_distance": _pairwise,
    "prelu": _leaky,
}
