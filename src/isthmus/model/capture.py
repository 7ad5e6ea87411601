"""Captures a model as its blocks, without weights: what planners, the simulator and the runtime know of it.

The steps are: export the operations (`torch_export`, `trace`), find out what flows and what it costs (`flow`, `costs`),
cut (`blocks`, `sections`), and describe (`describe`). If export cannot follow a model, its child modules are the blocks
(`modules`).
"""

from __future__ import annotations

from torch import nn

from isthmus.errors import UsageError
from isthmus.model.describe import describe
from isthmus.model.graph import BlockGraph
from isthmus.model.modules import cut_modules
from isthmus.model.quiet import without_weight_warnings
from isthmus.model.sections import cut_trace
from isthmus.model.torch_export import Example, NotExportedError
from isthmus.model.trace import trace
from isthmus.model.unreached import without_unreached

__all__ = ["Example", "capture"]


def capture(
    model: nn.Module, example: Example, *, name: str, sequence: int | None = None, max_blocks: int = 128
) -> BlockGraph:
    """Return the model's block graph, captured in training mode; the model may be on the meta device."""
    if max_blocks < 1:
        raise UsageError("a model needs at least one block", found=f"max_blocks={max_blocks}", expected="1 or more")
    try:
        with without_weight_warnings():
            traced = trace(model, example)
    except NotExportedError:
        return cut_modules(model, example, name=name, sequence=sequence, max_blocks=max_blocks).graph
    return describe(model, cut_trace(without_unreached(traced), max_blocks), name=name, sequence=sequence)
