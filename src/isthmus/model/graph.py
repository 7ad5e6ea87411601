"""The cost of a model, block by block: all that planners and the simulator know of it.

All sizes are per sample unless said otherwise, in elements (not bytes) if they depend on the job's precision.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

__all__ = ["NORMS", "UNMEASURED", "Block", "BlockGraph", "Linear", "Parameter", "Split", "Tensor", "TensorSplit"]

Split = Literal["concat", "sum", "whole"]
NORMS = ("batch_norm", "native_batch_norm")  # operations that mix samples, whose statistics replicas can add up
UNMEASURED = "torch.export cannot follow it, and without weights nothing could be measured"


class Linear(msgspec.Struct, frozen=True, kw_only=True):
    """A weight used as a matrix product: `rows` input rows per sample, each of `inputs` -> `outputs` elements.

    Its gradient is the product of the inputs and the output gradients, so sync `factors` may send those instead.
    """

    rows: float
    inputs: int
    outputs: int


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One trained tensor under its first name in the model; `ties` are its other names."""

    name: str
    elements: int
    shape: tuple[int, ...]
    ties: tuple[str, ...] = ()
    linear: Linear | None = None


class TensorSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a block that tensor parallelism can split.

    It consists of pairs of column- and row-split linear layers, as in Megatron.

    With n devices the split part of FLOPs, parameters and activations is divided by n; each of the `reduces`
    all-reduces (forward; as many backward) carries `elements` per sample. n must divide `heads` (0: no limit).
    """

    parameters: tuple[str, ...]
    flops: float  # the part of forward FLOPs per sample that is divided
    saved: float  # the part of saved elements per sample that is divided
    reduces: int
    elements: float
    heads: int = 0


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest part of a model that a planner may place.

    `digest` hashes what the block computes (operations, shapes), not its name: equal blocks share their profile.
    """

    name: str
    digest: str
    parameters: tuple[str, ...]  # first names; a tied parameter is listed in every block that uses it
    forward_flops: float
    backward_flops: float
    saved: float  # elements kept from forward to backward (inputs of the block count once, if they are saved)
    moved: float  # elements read and written by the forward operations: the memory side of the roofline
    weights_moved: float  # parameter elements read by one forward, whatever the samples
    operations: int  # kernels started by one forward
    workspace: float = 0.0  # largest sum of elements alive inside the block beyond what is saved
    mixes_samples: tuple[str, ...] = ()  # batch norms, and operations that are not proven to keep samples apart
    tensor: TensorSplit | None = None

    @property
    def statistics(self) -> bool:
        """Return whether the block takes statistics over the batch, which replicas can add up."""
        return any(operation in NORMS for operation in self.mixes_samples)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Return the operations that are not proven to keep samples apart, each with its line of code."""
        return tuple(operation for operation in self.mixes_samples if operation not in NORMS)


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """A value made in one block and used in later ones. `source` -1 is the model's input.

    `elements` is per sample; `fixed` counts elements that do not grow with the batch. `split` says how the parts of a
    split batch become the whole: concatenate along the batch dimension, sum, or neither (every part must be whole).
    `grad` says whether a gradient of the same size flows back.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    elements: float
    fixed: float = 0.0
    width: int | None = None  # bytes per element if not the job's precision (integers: 8, masks: 1)
    split: Split = "concat"
    grad: bool = True


class BlockGraph(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A captured model: blocks in topological order (every prefix is closed), the tensors between them, parameters."""

    name: str
    blocks: tuple[Block, ...]
    tensors: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...]
    sequence: int | None = None
    buffers: int = 0  # elements of non-trained state: batch statistics and frozen parameters
    outputs: float = 0.0  # elements per sample of the model's output, which its loss reads
    how: Literal["export", "modules"] = "export"  # what the blocks were cut from
    unreached: tuple[str, ...] = ()  # parameters that no loss can reach: they are not trained, and not in `parameters`
    digest: str = ""  # hash of everything above but the name

    @cached_property
    def by_name(self) -> dict[str, int]:
        """Return the index of each block by its name."""
        return {block.name: index for index, block in enumerate(self.blocks)}

    @cached_property
    def parameter(self) -> dict[str, Parameter]:
        """Return each parameter by its first name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def elements(self) -> int:
        """Return the number of trained elements, counting ties once."""
        return sum(parameter.elements for parameter in self.parameters)

    @cached_property
    def flops(self) -> float:
        """Return the forward and backward FLOPs of one sample."""
        return sum(block.forward_flops + block.backward_flops for block in self.blocks)
