"""Sync `factors`: rebuild the gradients of linear weights from the inputs and output gradients of all participants.

The gradient of y = x Wᵀ is the product Gᵀ X of the rows of output gradients G and of inputs X. Over all participants it
is the product of all their rows, which are much smaller than the weight if there are few. (Zhang et al., Poseidon,
2017.)

Every participant multiplies the same rows in the same order, its own included, once per micro-batch. So the gradients
are bit for bit equal wherever the same product of the same numbers is: on devices of one kind, with as many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from isthmus.errors import ModelError
from isthmus.runtime.comm.channel import Channels
from isthmus.runtime.comm.factor_exchange import FactorExchange, TurnLine
from isthmus.runtime.comm.syncs import Ring
from isthmus.runtime.program import BucketSpec, Program

__all__ = ["FactorTap", "Factors", "make_factors", "tap"]

Sink = Callable[[Tensor, Tensor], None]

_LINEAR, _ADDMM = torch.ops.aten.linear.default, torch.ops.aten.addmm.default
_PRODUCTS = (_LINEAR, _ADDMM, torch.ops.aten.mm.default, torch.ops.aten.matmul.default)
_TURNS = (
    torch.ops.aten.t.default, torch.ops.aten.numpy_T.default, torch.ops.aten.mT.default, torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
)  # fmt: skip


# -- taking the factors out of a model


class _Product(torch.autograd.Function):
    """x W (or x Wᵀ) + b, whose backward passes on the factors of W's gradient instead of multiplying them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tap: FactorTap) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tap, ctx.bias = tap, None if bias is None else bias.shape
        turned = weight if tap.outputs_first else weight.t()
        if bias is None or bias.dim() == 1:
            return torch.nn.functional.linear(x, turned, bias)
        return torch.addmm(bias, x, turned.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, weight), (given,), tap = ctx.saved_tensors, gradients, ctx.tap
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = torch.matmul(given, weight if tap.outputs_first else weight.t())
        to_bias = given.sum_to_size(ctx.bias) if ctx.bias is not None and ctx.needs_input_grad[2] else None
        inputs, outputs = x.reshape(-1, x.shape[-1]), given.reshape(-1, given.shape[-1])
        tap.sink(*((outputs, inputs) if tap.outputs_first else (inputs, outputs)))
        return to_x, None, to_bias, None


class FactorTap(nn.Module):
    """The product of an activation with a weight, which is (outputs, inputs) or the other way around.

    It adds nothing to the weight's gradient. Instead every backward calls `sink(left, right)` with one row for each row
    of the activation; leftᵀ right is the gradient. A forward that is recomputed calls nothing.
    """

    def __init__(self, outputs_first: bool, sink: Sink) -> None:
        super().__init__()
        self.outputs_first, self.sink = outputs_first, sink

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the operation that this module replaces."""
        return _Product.apply(x, weight, bias, self)  # type: ignore[no-any-return,no-untyped-call]


def tap(modules: Iterable[nn.Module], name: str, weight: nn.Parameter, sink: Sink) -> None:
    """Replace the one product that uses the weight by a `FactorTap`, in a captured graph or an `nn.Linear`."""
    found = 0
    for module in {id(inner): inner for outer in modules for inner in outer.modules()}.values():
        if isinstance(module, nn.Linear) and module.weight is weight:
            _tap_linear(module, FactorTap(True, sink))
            found += 1
        elif isinstance(module, fx.GraphModule):
            found += _tap_graph(module, name, weight, sink)
    if found != 1:
        raise _untapped(name, f"{found} products that use it")


def _tap_linear(module: nn.Linear, replaced: FactorTap) -> None:
    module.forward = lambda input: replaced(input, module.weight, module.bias)  # type: ignore[method-assign]


def _tap_graph(module: fx.GraphModule, name: str, weight: nn.Parameter, sink: Sink) -> int:
    """Replace the products that use the weight in a graph, and return their number."""
    held = [node for node in module.graph.nodes if node.op == "get_attr" and _content(module, node) is weight]
    products = [(node, *product) for node in held for product in _products(name, node, False)]
    for number, (parameter, product, used, turned) in enumerate(products):
        x, bias = _operands(name, product, used)
        child = f"{product.name}_factors_{number}"
        module.add_submodule(child, FactorTap((product.target is _LINEAR) != turned, sink))
        with module.graph.inserting_before(product):
            product.replace_all_uses_with(module.graph.call_module(child, (x, parameter, bias)))
        module.graph.erase_node(product)
    if products:
        module.graph.lint()
        module.recompile()
    return len(products)


def _content(module: nn.Module, node: fx.Node) -> object:
    *path, last = str(node.target).split(".")
    for part in path:
        module = getattr(module, part)
    return getattr(module, last)


def _products(name: str, used: fx.Node, turned: bool) -> list[tuple[fx.Node, fx.Node, bool]]:
    """Return the products that read a weight, each with the node it reads and whether that is transposed."""
    found: list[tuple[fx.Node, fx.Node, bool]] = []
    for user in used.users:
        if user.target in _TURNS:
            found += _products(name, user, not turned)
        elif user.target in _PRODUCTS:
            found.append((user, used, turned))
        else:
            raise _untapped(name, f"operation {user.target}")
    return found


def _operands(name: str, product: fx.Node, used: fx.Node) -> tuple[Any, Any]:
    """Return the activation and the bias of a product; raise ModelError unless its other operand is the weight."""
    if product.target is _ADDMM:
        bias, x, weight = product.args[:3]
    else:
        x, weight, bias = (*product.args, None)[:3]
    if weight is not used or x is used or bias is used or product.kwargs or len(product.args) > 3:
        raise _untapped(name, product.format_node() or product.name)
    return x, bias


def _untapped(name: str, found: str) -> ModelError:
    return ModelError(
        f"{name} cannot be synced by factors",
        found=found,
        expected="one product of an activation and this weight",
        next="Use ring for it",
    )


# -- exchanging them


class Factors:
    """The sync of a bucket of linear weights; its messages leave during the backward pass."""

    scatters = False

    def __init__(self, exchanges: Sequence[FactorExchange], ring: Ring | None = None) -> None:
        """Set up the sync; `ring` links all participants for new weights if each updates a piece."""
        self.exchanges, self._ring = exchanges, ring

    def all_reduce(self, flat: Tensor) -> None:
        """Wait for all factors; the gradients to which they are added must be views of `flat`."""
        for exchange in self.exchanges:
            exchange.wait()

    def reduce_scatter(self, flat: Tensor) -> None:
        """Do the same as `all_reduce`."""
        self.all_reduce(flat)

    def all_gather(self, flat: Tensor) -> None:
        """Send the pieces around the ring of the participants."""
        if self._ring is not None:
            self._ring.all_gather(flat)

    def close(self) -> None:
        """End the threads."""
        for exchange in self.exchanges:
            exchange.close()


def make_factors(
    spec: BucketSpec,
    program: Program,
    network: Channels,
    modules: Mapping[int, Sequence[nn.Module]],
    parameters: Mapping[str, nn.Parameter],
    lines: dict[int, TurnLine],
    ring: Ring | None = None,
) -> Factors:
    """Tap a bucket's weights in the modules of each run (by its index), and connect them with the other participants.

    `lines` holds one line for each run, for all its buckets; missing ones are added.
    """
    exchanges = []
    for name in spec.parameters:
        weight = parameters[name]
        run = next(i for i in modules if any(p is weight for module in modules[i] for p in module.parameters()))
        channels = [
            None if other == program.device else network.channel(f"{program.job.name} factors {name}", other)
            for other in spec.members
        ]
        if run not in lines:
            lines[run] = TurnLine()
        exchange = FactorExchange(name, weight, channels, program.runs[run].slices, lines[run])
        tap(modules[run], name, weight, exchange.take)
        exchanges.append(exchange)
    return Factors(exchanges, ring)
