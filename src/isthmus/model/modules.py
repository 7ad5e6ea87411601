"""Makes blocks from child modules, for models that `torch.export` cannot follow.

The model is run without data at two batch sizes while hooks watch which child modules it calls. If each child's result
goes straight into the next child and nowhere else, the children become blocks. If the flow between them is anything but
such a chain, the whole model is one block. Costs are metered operation by operation during those runs; backward is
taken as twice forward. Nothing is proven of such blocks: whether they keep samples apart is measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import isthmus
from isthmus.errors import ModelError
from isthmus.model.blocks import Item, choose_blocks
from isthmus.model.describe import parameters_of, untrained_elements
from isthmus.model.digest import digest_of
from isthmus.model.gradients import NoHooks
from isthmus.model.graph import Block, BlockGraph, Tensor
from isthmus.model.restored_state import kept_state
from isthmus.model.samples.measured import measured_mixing
from isthmus.model.torch_export import Example, LinearSize, example_of, probes_of, training
from isthmus.model.trace import tensors_of

__all__ = ["ModuleCut", "cut_modules"]


@dataclass(frozen=True, eq=False)
class ModuleCut:
    """Blocks as runs of child modules, each with its path, in the order they are called; path "" is the whole model."""

    graph: BlockGraph
    runs: tuple[tuple[tuple[str, nn.Module], ...], ...]


@dataclass
class _Meter:
    """The costs of one child at one batch size."""

    flops: float = 0.0
    moved: float = 0.0
    operations: int = 0
    kept: dict[int, float] = field(default_factory=dict)  # by memory
    result: Any = None


@dataclass(frozen=True)
class _Total:
    """The costs of a run of children at one batch size."""

    flops: float
    moved: float
    saved: float
    operations: int
    result: Any


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds every operation to the current meter."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            formula = flop_registry.get(func.overloadpacket)
            self.meter.flops += formula(*args, **(kwargs or {}), out_val=result) if formula else 0
            self.meter.moved += sum(t.numel() for t in tensors_of((args, result)))
            self.meter.operations += 1
        return result


def cut_modules(
    model: nn.Module,
    example: Example,
    *,
    name: str,
    sequence: int | None = None,
    max_blocks: int = 128,
    measure: bool = True,
) -> ModuleCut:
    """Return the model's children as blocks if they form a chain, else the model as one block.

    With `measure`, each block is run to find out whether it keeps samples apart, which is impossible without weights.
    """
    probes = probes_of(example)
    children = _opened("", model)
    with training(model):
        low, high = (_run(model, children, example_of(model, example, p)) for p in probes)
        if not isinstance(low, list) or not isinstance(high, list):
            children = [("", model)]
            low, high = (_run(model, children, example_of(model, example, p)) for p in probes)
    if not isinstance(low, list) or not isinstance(high, list):
        raise _unfollowed(name, low if isinstance(low, Exception) else high)
    runs = _runs(model, children, high, max_blocks)
    totals = [(_total([low[i] for i in run]), _total([high[i] for i in run])) for run in runs]
    named = [[children[i] for i in run] for run in runs]
    mixing = measured_mixing(model, named, example) if measure else [None] * len(named)
    graph = _describe(model, example, named, totals, probes, mixing)
    graph = msgspec.structs.replace(graph, name=name, sequence=sequence)
    return ModuleCut(msgspec.structs.replace(graph, digest=digest_of(graph)), tuple(map(tuple, named)))


def _unfollowed(name: str, fault: Any) -> ModelError:
    return ModelError(
        "the model can neither be exported nor run without data",
        where=name,
        found=_said(fault) if isinstance(fault, Exception) else None,
        expected="a forward whose course does not depend on the values of tensors",
        next="Save its block graph where it can be captured, or cut it by hand into modules called in sequence",
    )


def _said(fault: Exception) -> str:
    """Return an exception as text, with the last line of the model's own code that led to it."""
    others = tuple(str(Path(file).parent) for file in (torch.__file__, isthmus.__file__))
    lines = [frame for frame in extract_tb(fault.__traceback__) if not frame.filename.startswith(others)]
    where = f" (line {lines[-1].lineno} of {Path(lines[-1].filename).name}: {lines[-1].line})" if lines else ""
    return f"{type(fault).__name__}: {next(iter(str(fault).splitlines()), '')[:200]}{where}"


def _opened(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children in order, opening lists, sequences, and the only child of a module."""
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    opened: list[tuple[str, nn.Module]] = []
    for child_path, child in children:
        inside = isinstance(child, (nn.Sequential, nn.ModuleList)) or len(children) == 1
        grandchildren = _opened(child_path, child) if inside else []
        opened += grandchildren or [(child_path, child)]
    return opened


def _run(model: nn.Module, children: list[tuple[str, nn.Module]], example: Example) -> list[_Meter] | Exception | None:
    """Return the meters of the children in order, or None if they are not one chain from input to output.

    If the model cannot be run without data, return the exception that it raised.
    """
    if not children:
        return None
    whole = len(children) == 1 and children[0][1] is model
    meters = [_Meter() for _ in children]
    flow: list[tuple[int, Any]] = []  # (child, its inputs), in the order of calls
    try:
        hooks = nullcontext() if whole else NoHooks()  # a hook on a tensor between two children would be lost
        with kept_state(model), FakeTensorMode(allow_non_fake_inputs=True) as mode, sdpa_kernel(SDPBackend.MATH), hooks:
            args, kwargs = pytree.tree_map(mode.from_tensor, (example.args, example.kwargs))
            with _Watch(_Meter()) as watch, _hooks(children, meters, watch, flow), _keeping(model, watch):
                result = model(*args, **kwargs)
    except Exception as fault:  # the model may do anything that needs data
        return fault
    return meters if whole or _is_chain(meters, flow, (*args, *kwargs.values()), result) else None


@contextmanager
def _hooks(
    children: list[tuple[str, nn.Module]], meters: list[_Meter], watch: _Watch, flow: list[tuple[int, Any]]
) -> Iterator[None]:
    outer = watch.meter
    handles = []
    for index, (_, module) in enumerate(children):

        def before(_: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
            flow.append((index, (*args, *kwargs.values())))
            watch.meter = meters[index]

        def after(_: nn.Module, args: Any, result: Any, index: int = index) -> None:
            meters[index].result = result
            watch.meter = outer

        handles += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _keeping(model: nn.Module, watch: _Watch) -> Iterator[None]:
    parameters = {id(p) for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in parameters and not isinstance(tensor, nn.Parameter):
            size = tensor.numel() * (1.0 if tensor.is_floating_point() else tensor.element_size() / 4)
            memory = tensor.untyped_storage()._cdata
            watch.meter.kept[memory] = max(size, watch.meter.kept.get(memory, 0.0))
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


def _is_chain(meters: list[_Meter], flow: list[tuple[int, Any]], inputs: Sequence[Any], result: Any) -> bool:
    """Return whether the children form a chain.

    Every child is called once, in order, with nothing but the result of the child before it; the last gives the result.
    """
    if [index for index, _ in flow] != list(range(len(meters))):
        return False
    given: list[Any] = [tuple(inputs), *((meter.result,) for meter in meters)]
    fits = all(
        len(taken) == len(before) and all(a is b for a, b in zip(taken, before, strict=True))
        for (_, taken), before in zip(flow, given, strict=False)
    )
    return fits and result is meters[-1].result and all(isinstance(m.result, torch.Tensor) for m in meters)


def _runs(model: nn.Module, children: list[tuple[str, nn.Module]], meters: list[_Meter], limit: int) -> list[list[int]]:
    flops = max(sum(meter.flops for meter in meters), 1.0)
    elements = max(sum(p.numel() for p in model.parameters()), 1)
    items = [
        Item(
            reads=(index - 1,) if index else (),
            share=(meter.flops / flops + sum(p.numel() for p in module.parameters()) / elements) / 2,
            elements=float(meter.result.numel()) if isinstance(meter.result, torch.Tensor) else 0.0,
            heavy=any(True for _ in module.parameters()),
            module=path,
        )
        for index, ((path, module), meter) in enumerate(zip(children, meters, strict=True))
    ]
    return choose_blocks(items, [], limit)


def _describe(
    model: nn.Module,
    example: Example,
    runs: list[list[tuple[str, nn.Module]]],
    meters: list[tuple[_Total, _Total]],
    probes: tuple[int, int],
    mixing: Sequence[str | None],
) -> BlockGraph:
    inputs = [*example.args, *example.kwargs.values()]
    tensors = [_input(i, tensor) for i, tensor in enumerate(inputs)]
    tensors += [_between(i, *pair, probes) for i, pair in enumerate(meters[:-1])]
    unreached = _unreached(model, meters[-1][1].result)
    blocks = tuple(
        _block(model, run, pair, probes, unreached, why) for run, pair, why in zip(runs, meters, mixing, strict=True)
    )
    return BlockGraph(
        name="",
        blocks=blocks,
        tensors=tuple(tensors),
        parameters=parameters_of(model, blocks, {}),
        buffers=untrained_elements(model),
        outputs=_outputs(*meters[-1], probes),
        how="modules",
        unreached=unreached,
    )


def _unreached(model: nn.Module, result: Any) -> tuple[str, ...]:
    """Return the parameters that no loss can reach, because autograd has no way from the result to them.

    A function with a backward of its own may know ways that are not seen, as a re-entrant checkpoint does. If there is
    one, all parameters count as reached.
    """
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_of(result) if tensor.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            return ()
        after = [source for source, _ in node.next_functions if source is not None and source not in seen]
        seen.update(after)
        waiting += after
    reached = {id(node.variable) for node in seen if hasattr(node, "variable")}
    return tuple(name for name, p in model.named_parameters() if p.requires_grad and id(p) not in reached)


def _block(
    model: nn.Module,
    run: list[tuple[str, nn.Module]],
    meters: tuple[_Total, _Total],
    probes: tuple[int, int],
    unreached: tuple[str, ...],
    mixing: str | None,
) -> Block:
    first = {id(p): n for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    parameters = [p for _, module in run for p in module.parameters() if p.requires_grad]
    names = dict.fromkeys(first[id(p)] for p in parameters)
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for _, module in run for m in module.modules())
    low, high = meters

    def slope(what: str) -> float:
        return LinearSize.through(probes, getattr(low, what), getattr(high, what)).slope

    block = Block(
        name=run[0][0] or type(model).__name__,
        digest="",
        parameters=tuple(name for name in names if name not in unreached),
        forward_flops=slope("flops"),
        backward_flops=2 * slope("flops"),
        saved=slope("saved"),
        moved=slope("moved"),
        weights_moved=float(sum(p.numel() for p in parameters)),
        operations=high.operations,
        mixes_samples=("batch_norm",) if norms else (),
    )
    found = (*block.mixes_samples, *((mixing,) if mixing else ()))
    return msgspec.structs.replace(block, digest=_digest(block), mixes_samples=found)


def _total(meters: list[_Meter]) -> _Total:
    """Return the costs of a run, whose result is that of its last child."""
    return _Total(
        flops=sum(meter.flops for meter in meters),
        moved=sum(meter.moved for meter in meters),
        saved=sum(sum(meter.kept.values()) for meter in meters),
        operations=sum(meter.operations for meter in meters),
        result=meters[-1].result,
    )


def _digest(block: Block) -> str:
    return hashlib.sha256(repr(msgspec.structs.replace(block, name="", parameters=())).encode()).hexdigest()


def _input(index: int, tensor: torch.Tensor) -> Tensor:
    width = None if tensor.is_floating_point() else tensor.element_size()
    elements = float(tensor.numel() / tensor.shape[0]) if tensor.shape[0] else 0.0
    return Tensor(name=f"input{index}", source=-1, targets=(0,), elements=elements, width=width, grad=False)


def _outputs(low: _Total, high: _Total, probes: tuple[int, int]) -> float:
    """Return the elements per sample of the first result with numbers, as `describe` counts them."""
    firsts = [[t.numel() for t in tensors_of(total.result) if t.is_floating_point()][:1] for total in (low, high)]
    return LinearSize.through(probes, sum(firsts[0]), sum(firsts[1])).slope


def _between(index: int, low: _Total, high: _Total, probes: tuple[int, int]) -> Tensor:
    line = LinearSize.through(probes, low.result.numel(), high.result.numel())
    return Tensor(
        name=f"between{index}",
        source=index,
        targets=(index + 1,),
        elements=line.slope,
        fixed=line.fixed,
        split="concat" if line.slope > 0 else "whole",
    )
