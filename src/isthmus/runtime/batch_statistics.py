"""Batch norm over the whole micro-batch if the replicas of a stage split it.

Replica r has n_r values of a channel, with mean m_r and variance v_r. Let d_r = m_r - c for any c that all replicas
share (the running mean: it is close to the mean, so nothing cancels). One sum over the replicas of

    n_r,   n_r d_r,   n_r (v_r + d_r^2)      gives      n,   n (m - c),   n (v + (m - c)^2)

and so the mean m and variance v of all n values, in fp64. In the backward pass, with x' the normalised input, g the
gradient of the result and w the weight, a second sum over the replicas of (sum g, sum g x') gives

    gradient of x = w / sqrt(v + eps) (g - sum g / n - x' sum(g x') / n)

The gradients of weight and bias stay sums over the replica's own samples: they add up when gradients are synchronised.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from isthmus.errors import ModelError
from isthmus.model.graph import NORMS
from isthmus.model.restored_state import kept_state
from isthmus.model.samples.fixed_norms import NormForward, fixed_or
from isthmus.model.trace import kind_of

__all__ = ["synchronised", "unchanged"]

Reduce = Callable[[Tensor], Tensor]  # returns the sum over the replicas, with the same bits on all of them


def synchronised(block: nn.Module, reduce: Reduce) -> nn.Module:
    """Change the block so that its batch norms in training see the micro-batches of all replicas, and return it.

    Every replica must run its blocks in the same order, forwards and backwards: each batch norm calls `reduce` once in
    each direction. Running statistics become equal on all replicas.
    """
    if isinstance(block, fx.GraphModule):
        _rewrite(block, reduce)
    else:
        for norm in block.modules():
            if isinstance(norm, _BatchNorm):
                norm.forward = NormForward(norm, SynchronisedNorm(reduce))  # type: ignore[method-assign]
    return block


def _rewrite(block: fx.GraphModule, reduce: Reduce) -> None:
    norms = [node for node in block.graph.nodes if _is_norm(node)]
    for number, node in enumerate(norms):
        name = f"_synchronised_{number}"
        block.add_submodule(name, SynchronisedNorm(reduce))
        with block.graph.inserting_before(node):
            new = block.graph.call_module(name, (*node.args[:5], *node.args[6:8]))
        for old in _results(node):
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
            if old is not node:
                block.graph.erase_node(old)
        block.graph.erase_node(node)
    block.recompile()


def _is_norm(node: fx.Node) -> bool:
    return node.op == "call_function" and kind_of(node.target) in NORMS and bool(node.args[5])


def _results(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that stand for the normalised tensor; the native operation returns the statistics beside it."""
    if kind_of(node.target) == "batch_norm":
        return [node]
    users = list(node.users)
    if any(user.target is not operator.getitem or (user.args[1] != 0 and user.users) for user in users):
        raise ModelError(
            "a model uses the statistics of its own batch norm, which are not those of the whole micro-batch",
            found=str(node.target),
            expected="torch.nn.functional.batch_norm",
        )
    return users


class SynchronisedNorm(nn.Module):
    """Batch norm in training over all replicas. Its parameters and running statistics are passed to each call."""

    def __init__(self, reduce: Reduce) -> None:
        super().__init__()
        self._reduce = reduce
        self._normalise = fixed_or(self._synchronised)

    def forward(self, *args: Any) -> Tensor:
        """Normalise as in `_synchronised`, unless statistics are fixed for a while."""
        return self._normalise(*args)

    def _synchronised(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Normalise [samples, channels, ...], and move the running statistics towards those of this micro-batch."""
        y, count, mean, var = _Norm.apply(x, weight, bias, running_mean, eps, self._reduce)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.lerp_((var * count / (count - 1)).to(running_var.dtype), momentum)
        result: Tensor = y
        return result


class _Norm(torch.autograd.Function):
    """The normalised tensor, and the count, mean and variance over all replicas in fp64."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, near: Tensor | None, eps: float, reduce: Reduce
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = _wide(x)
        count, mean, var = _pooled(wide, near, reduce)
        centre, scale = (_across(s, wide) for s in (mean, (var + eps).rsqrt()))
        y = (wide - centre) * scale
        if weight is not None:
            y = y * _across(weight, wide)
        if bias is not None:
            y = y + _across(bias, wide)
        ctx.save_for_backward(x, weight, centre, scale, count)
        ctx.reduce, ctx.bias = reduce, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(count, mean, var)
        return y.to(x.dtype), count, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, centre, scale, count = ctx.saved_tensors
        g, dims = _wide(grads[0]), _dims(x)
        normal = (_wide(x) - centre) * scale
        sums = torch.stack([g.sum(dims), (g * normal).sum(dims)])
        of_x = None
        if ctx.needs_input_grad[0]:
            first, second = ctx.reduce(sums.double().flatten()).view_as(sums) / count
            of_x = (g - _across(first, g) - normal * _across(second, g)) * scale
            of_x = (of_x if weight is None else of_x * _across(weight, g)).to(x.dtype)
        of_weight = None if weight is None else sums[1].to(weight.dtype)
        return of_x, of_weight, None if ctx.bias is None else sums[0].to(ctx.bias), None, None, None


def _pooled(x: Tensor, near: Tensor | None, reduce: Reduce) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of values of a channel on all replicas together, and the channels' means and variances."""
    var, mean = (s.double() for s in torch.var_mean(x, _dims(x), correction=0))
    base = torch.zeros_like(mean) if near is None else near.double()
    count, apart = mean.new_full((1,), x.numel() // x.shape[1]), mean - base
    sums = reduce(torch.cat([count, count * apart, count * (var + apart**2)]))
    apart, square = sums[1:].view(2, -1) / sums[0]
    return sums[:1], base + apart, (square - apart**2).clamp_min(0)


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _across(channels: Tensor, x: Tensor) -> Tensor:
    return channels.to(x.dtype).view(1, -1, *[1] * (x.dim() - 2))


# -- recomputation


@contextmanager
def unchanged(block: nn.Module) -> Iterator[None]:
    """Restore the block's buffers, counters and attributes at the end of the context, so that it may run again.

    An exported block whose operations write into nothing keeps no state.
    """
    state = _state_of(block) if isinstance(block, fx.GraphModule) else []
    before = [tensor.detach().clone() for tensor in state]
    with nullcontext() if isinstance(block, fx.GraphModule) else kept_state(block):
        try:
            yield
        finally:
            for tensor, content in zip(state, before, strict=True):
                tensor.data.copy_(content)  # unseen by autograd, which would take it for a change of a saved tensor


def _state_of(block: fx.GraphModule) -> list[Tensor]:
    """Return the tensors into which the block's operations may write.

    These are all buffers if operations write into anything (which may be a view of one), and the written parameters.
    """
    graphs = [inner for inner in block.modules() if isinstance(inner, fx.GraphModule)]
    written = [(inner, source) for inner in graphs for node in inner.graph.nodes for source in _changed(inner, node)]
    names = dict.fromkeys((inner, str(source.target)) for inner, source in written if source.op == "get_attr")
    named = [operator.attrgetter(name)(inner) for inner, name in names]
    return [*(block.buffers() if written else ()), *(one for one in named if isinstance(one, nn.Parameter))]


def _changed(block: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values a node writes into."""
    called = block.get_submodule(str(node.target)) if node.op == "call_module" else None
    if _is_norm(node) or isinstance(called, SynchronisedNorm):
        return [source for source in node.args[3:5] if isinstance(source, fx.Node)]
    schema = getattr(node.target, "_schema", None)
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] if schema else []
    given = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | node.kwargs if schema else {}
    found = (one for name in written for one in pytree.tree_leaves(given.get(name)))
    return [source for source in found if isinstance(source, fx.Node)]
