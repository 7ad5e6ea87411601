"""Checks divided blocks: run without data, every tensor must have the shape that the rules of division say."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from isthmus.errors import ModelError
from isthmus.model.sections import Section
from isthmus.model.tensor_parallel.crossing import Enter, Leave
from isthmus.model.tensor_parallel.division_rules import DividedTensor
from isthmus.model.trace import Trace, Value, tensors_of

__all__ = ["prove"]

_FAKING = threading.Lock()  # the mode keeps some of its state for the whole process, and members may be threads of one

Shape = tuple[int, ...]


def prove(
    module: fx.GraphModule,
    trace: Trace,
    section: Section,
    parts: dict[fx.Node, tuple[DividedTensor, ...]],
    copies: dict[fx.Node, Any],
    members: int,
) -> None:
    """Run the block of a member at both probes; raise a ModelError that names an operation with a wrong shape.

    `copies` maps operations of the trace to the block's. Nothing is sent: a sum over the members keeps its shape.
    """
    widths = {attribute.name: trace.value(node) for node, attribute in trace.attributes.items() if node in trace.values}
    for probe in (0, 1):
        expected = {
            copies[op.node].name: [
                _divided(value.shapes[probe], part, members)
                for value, part in zip(op.values, parts.get(op.node, (None,) * len(op.values)), strict=True)
            ]
            for op in section.local
        }
        inputs = [trace.value(node) for node in section.incoming]
        _Blank(module, widths, expected).start(inputs, probe, section)


def _divided(shape: Shape, part: DividedTensor | None, members: int) -> Shape:
    return tuple(size // members if part and dim == part.dim else size for dim, size in enumerate(shape))


class _Blank(fx.Interpreter):
    """Runs a block on tensors without data, of the dtypes of the trace."""

    def __init__(self, module: fx.GraphModule, widths: dict[str, Value], expected: dict[str, list[Shape]]) -> None:
        super().__init__(module)
        self.widths, self.expected = widths, expected
        self.device = next(iter(module.parameters())).device

    def start(self, inputs: list[Value], probe: int, section: Section) -> None:
        """Run the block once, on inputs of the shapes at one probe."""
        with _FAKING, FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            blanks = [torch.empty(v.shapes[probe], dtype=v.dtype, device=self.device) for v in inputs]
            try:
                self.run(*blanks)
            except ModelError:
                raise
            except Exception as error:  # an operation may raise anything if sizes do not fit together
                text = next(iter(str(error).splitlines()), type(error).__name__)[:200]
                raise _unproven(section.ops[0].module, text) from error

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and compare the shapes of its result with the expected ones."""
        result = super().run_node(n)
        if n.name in self.expected:
            shapes = [tuple(tensor.shape) for tensor in tensors_of(result)]
            if shapes != self.expected[n.name]:
                raise _unproven(n.name, f"{shapes}, expected {self.expected[n.name]}")
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a parameter or buffer without its data, or a nested graph as it is."""
        content = super().get_attr(target, args, kwargs)
        if not isinstance(content, Tensor):
            return content
        return torch.empty(content.shape, dtype=self.widths[str(target)].dtype, device=content.device)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a module, or return the input where a tensor would be sent: sending keeps its shape."""
        if isinstance(self.fetch_attr(target), Enter | Leave):
            return args[0]
        return super().call_module(target, args, kwargs)


def _unproven(where: str, found: str) -> ModelError:
    return ModelError(
        "a block divided over a tensor group does not have the shapes it must have",
        where=where or None,
        found=found,
        next="Use a plan whose replicas are single devices for this block",
    )
