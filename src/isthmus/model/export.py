"""Exports a model's operations by `torch.export`, with the batch size left open.

Sizes are known at two batch sizes (the *probes*) p < q: from symbolic shapes where export keeps the batch symbolic,
else from two exports whose graphs are compared node by node. A size f is then read as the line
`f(batch) = slope * batch + fixed` through (p, f(p)) and (q, f(q)).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from isthmus.errors import ModelError
from isthmus.model.gradients import plain_gradients
from isthmus.model.regions import open_regions

__all__ = ["Example", "Exported", "Line", "example_of", "export_model", "probes_of", "training"]

_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)  # probes: sizes that are rarely another dimension of a model


@dataclass(frozen=True, kw_only=True)
class Example:
    """Inputs of a model; meta or real tensors, dimension 0 of each is the batch. Only shapes and dtypes are read."""

    args: tuple[torch.Tensor, ...] = ()
    kwargs: dict[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(given: Any) -> Example:
        """A tensor, several, or some by name."""
        if isinstance(given, Example):
            return given
        if isinstance(given, Mapping):
            return Example(args=(), kwargs=dict(given))
        return Example(args=tuple(given) if isinstance(given, (tuple, list)) else (given,), kwargs={})


@dataclass(frozen=True)
class Line:
    """`slope * batch + fixed`."""

    slope: float
    fixed: float

    @classmethod
    def through(cls, probes: tuple[int, int], low: float, high: float) -> Line:
        """The line through both sizes; a size that grows otherwise is taken as proportional to the batch."""
        slope = (high - low) / (probes[1] - probes[0])
        fixed = low - slope * probes[0]
        return cls(slope, fixed) if slope >= 0 and fixed >= 0 else cls(high / probes[1], 0.0)


@dataclass(frozen=True, eq=False)
class Exported:
    """An exported model; `symbolic` where its sizes are expressions, else nodes carry the higher probe's values too."""

    program: ExportedProgram
    probes: tuple[int, int]
    symbolic: bool


def export_model(model: nn.Module, example: Example) -> Exported | None:
    """The model's operations, or None where `torch.export` cannot follow it."""
    _check_example(example)
    probes = probes_of(example)
    with training(model):
        program = _export(model, example_of(model, example, probes[1]), dynamic=True)
        if program is not None:
            return Exported(program, probes, symbolic=True)
        low = _export(model, example_of(model, example, probes[0]), dynamic=False)
        high = _export(model, example_of(model, example, probes[1]), dynamic=False)
    if low is None or high is None or not _unify(low, high, probes):
        return None
    return Exported(low, probes, symbolic=False)


def _check_example(example: Example) -> None:
    for index, tensor in enumerate([*example.args, *example.kwargs.values()]):
        if tensor.ndim == 0:
            raise ModelError(
                "an example input has no batch dimension",
                where=f"input {index}",
                found="a tensor without dimensions",
                expected="dimension 0 of every input to be the batch",
            )
    if not example.args and not example.kwargs:
        raise ModelError("the example has no inputs", expected="at least one tensor whose dimension 0 is the batch")


def probes_of(example: Example) -> tuple[int, int]:
    """Two batch sizes that are no other dimension of the inputs."""
    taken = {size for t in [*example.args, *example.kwargs.values()] for size in t.shape[1:]}
    low, high, *_ = [prime for prime in _PRIMES if prime not in taken] + [101, 103]
    return low, high


def example_of(model: nn.Module, example: Example, batch: int) -> Example:
    """Inputs of that batch on the model's device; fresh ones, as export takes a tensor used twice for one input."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros((batch, *tensor.shape[1:]), dtype=tensor.dtype, device=device)

    return Example(args=tuple(map(fresh, example.args)), kwargs={k: fresh(t) for k, t in example.kwargs.items()})


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Training mode, and afterwards every module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _export(model: nn.Module, example: Example, *, dynamic: bool) -> ExportedProgram | None:
    shapes = None
    if dynamic:
        batch = Dim("batch", min=2)
        collection = ShapesCollection()  # type: ignore[no-untyped-call]
        for tensor in [*example.args, *example.kwargs.values()]:
            collection[tensor] = {0: batch}
        shapes = collection.dynamic_shapes(model, example.args, example.kwargs)  # type: ignore[no-untyped-call]
    try:
        with _SureCoins(), plain_gradients():
            program = export(model, example.args, example.kwargs, dynamic_shapes=shapes, strict=False)
    except Exception:  # whatever in the model export cannot follow; the caller has another way
        return None
    open_regions(program)
    return program


class _SureCoins(TorchFunctionMode):
    """Answers `torch.rand([]) < p` where p <= 0 or p >= 1 says the answer, as where layers may be dropped but are not.

    Export could not go on: it asks for a truth that depends on data. Nobody reads the number afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.lt, torch.Tensor.__lt__) and any(args[0] is drawn for drawn in self._drawn):
            limit, written = args[1], args[0]._version
            if isinstance(limit, (int, float)) and not (written or 0 < limit < 1):
                return limit >= 1
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.ndim == 0:
            self._drawn.append(result)
        return result


def _unify(low_program: ExportedProgram, high_program: ExportedProgram, probes: tuple[int, int]) -> bool:
    """Rewrites the low graph: integers that differ between the graphs are computed from the batch of the first input.

    False where the graphs differ in anything else: the model's code depends on the batch. Nested graphs are not
    compared, so that there may be none.
    """
    low, high = low_program.graph, high_program.graph
    if len(low.nodes) != len(high.nodes) or any(node.op == "get_attr" for node in low.nodes):
        return False
    first = next(n for n in low.nodes if n.name == low_program.graph_signature.user_inputs[0])
    with low.inserting_before(next(n for n in low.nodes if n.op != "placeholder")):
        batch = low.call_function(torch.ops.aten.sym_size.int, (first, 0))
    batch.meta.update(val=probes[0], high=probes[1])
    pairs = zip([n for n in low.nodes if n is not batch], high.nodes, strict=True)
    return all(_unify_node(a, b, batch, probes) for a, b in pairs)


def _unify_node(low: fx.Node, high: fx.Node, batch: fx.Node, probes: tuple[int, int]) -> bool:
    if low.op != high.op or (low.op == "call_function" and low.target != high.target):
        return False
    left, spec = pytree.tree_flatten((low.args, low.kwargs))
    right, other = pytree.tree_flatten((high.args, high.kwargs))
    if spec != other:
        return False
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if type(a) is not type(b) or (isinstance(a, fx.Node) and a.name != b.name):
            return False
        if isinstance(a, int) and a != b:
            line = Line.through(probes, a, b)
            if not (line.slope.is_integer() and line.fixed.is_integer()):
                return False
            left[index] = _scaled(batch, line, low, probes)
        elif not isinstance(a, fx.Node) and a != b:
            return False
    low.args, low.kwargs = pytree.tree_unflatten(left, spec)
    low.meta["high"] = high.meta.get("val")
    return True


def _scaled(batch: fx.Node, line: Line, before: fx.Node, probes: tuple[int, int]) -> fx.Node:
    """Nodes for `slope * batch + fixed` in front of another node."""
    with batch.graph.inserting_before(before):
        product = batch.graph.call_function(operator.mul, (batch, int(line.slope)))
        total = batch.graph.call_function(operator.add, (product, int(line.fixed)))
    product.meta.update(val=int(line.slope * probes[0]), high=int(line.slope * probes[1]))
    total.meta.update(val=product.meta["val"] + int(line.fixed), high=product.meta["high"] + int(line.fixed))
    return total
