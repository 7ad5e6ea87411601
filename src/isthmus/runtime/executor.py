"""The step of one worker: it takes its actions in order, computes runs, and sends what others wait for.

The order is the plan's schedule. A backward whose gradients have come may overtake forwards whose inputs have not: that
holds no more activations than planned. Every run takes its own actions in order whatever happens, so gradients add up
in the same order each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isthmus.errors import ModelError
from isthmus.model.runnable_blocks import Pieces
from isthmus.model.torch_export import Example
from isthmus.runtime.batch_statistics import unchanged
from isthmus.runtime.block_calls import BlockCalls, Unit
from isthmus.runtime.comm.channel import Channels
from isthmus.runtime.comm.flows import FlowForm, FlowPart, Inbox, Inflow, Key, Outflow, cut, messages
from isthmus.runtime.pace import Pace
from isthmus.runtime.program import Action, Flow, Program, StageRun, samples_of_slice
from isthmus.runtime.sample_check import ApartCheck

__all__ = ["Executor", "Hooks", "Watch", "WorkSpan"]

Loss = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


class Watch(Protocol):
    """An observer of what the executor is about to do, or has done."""

    def before(self, run: StageRun, stretch: int, backward: bool) -> None:
        """Prepare for a stretch: its weights must be there, and in a backward memory for its gradients."""

    def after(self, run: StageRun, stretch: int, backward: bool) -> None:
        """Take note that a stretch was computed.

        Its weights are not needed for now, and its gradients are those of this backward.
        """

    def final(self, run: StageRun, begins: bool) -> None:
        """Take note that the last backward of a run in this step begins, or has ended."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in memory that is released with its stretch's weights."""


@dataclass
class WorkSpan:
    """What a worker did in an interval, in seconds of its own clock."""

    what: str
    run: int
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Hooks:
    """The objects that the executor calls around computing."""

    watch: Watch
    calls: BlockCalls
    ordered: bool  # no action may overtake another
    pace: Pace  # slowed down before anything leaves the device


@dataclass
class _Stretch:
    """What the forward of a stretch keeps for its backward: the tensors it began with and the tensors it produced."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@dataclass
class _Saved:
    """What a forward keeps for its backward."""

    stretches: list[_Stretch]
    loss: Tensor | None
    lo: int
    hi: int


@dataclass
class _Tools:
    """Everything that is needed to compute a run."""

    run: StageRun
    modules: Sequence[nn.Module]
    outputs: list[_Sender] = field(default_factory=list)
    gradients: list[_Sender] = field(default_factory=list)
    inflows: list[Inflow] = field(default_factory=list)
    returned: tuple[str, ...] = ()  # tensors whose gradients come back
    fed: bool = False  # takes inputs of the model
    last: bool = False
    kept: tuple[frozenset[str], ...] = ()  # by stretch: its results that get gradients from elsewhere
    wanted: frozenset[str] = frozenset()  # results that leave the run
    compiled: dict[int, Sequence[Unit]] = field(default_factory=dict)  # by stretch


class Executor:
    """Runs the actions of one worker's program."""

    def __init__(
        self,
        program: Program,
        pieces: Pieces,
        modules: Mapping[int, Sequence[nn.Module]],
        network: Channels,
        device: torch.device,
        loss: Loss,
        hooks: Hooks,
    ) -> None:
        """Connect the runs; `modules` are the blocks of each run (by its index in the program)."""
        self.program, self.pieces, self.network, self.device = program, pieces, network, device
        self.loss, self.hooks = loss, hooks
        self.inbox = Inbox()
        self.spans: list[WorkSpan] | None = None
        self.seed = 1.0  # the gradient of each loss
        self._saved: dict[tuple[int, int, int], _Saved] = {}
        self._apart = ApartCheck(program, pieces)
        self._grad = {tensor.name for tensor in pieces.graph.tensors if tensor.grad and tensor.source >= 0}
        self._tools = [self._make(run, modules[i]) for i, run in enumerate(program.runs)]
        self._connect()

    # -- setting up

    def _make(self, run: StageRun, modules: Sequence[nn.Module]) -> _Tools:
        pieces, blocks = self.pieces, range(run.first, run.last + 1)
        returned = tuple(dict.fromkeys(name for flow in run.returns for name in flow.tensors))
        wanted = {*returned, *(name for name in pieces.outputs if isinstance(name, str))}
        leaving = {name for flow in (*run.outputs, *run.returns) for name in flow.tensors}
        kept = []
        for first, last in run.stretches:
            later = {name for block in range(last + 1, run.last + 1) for name in pieces.incoming[block]} | wanted
            kept.append(frozenset(name for block in range(first, last + 1) for name in pieces.outgoing[block]) & later)
        return _Tools(
            run=run,
            modules=modules,
            returned=returned,
            kept=tuple(kept),
            wanted=frozenset(wanted | leaving),
            fed=any(name in pieces.inputs for block in blocks for name in pieces.incoming[block]),
            last=run.last == len(pieces.blocks) - 1,
        )

    def _connect(self) -> None:
        runs = {run.number: run for run in self.program.runs}
        for tools in self._tools:
            run = tools.run
            tools.outputs = [self._sender(run, flow, runs, back=False) for flow in run.outputs]
            tools.gradients = [self._sender(run, flow, runs, back=True) for flow in run.gradients]
            for flows, back in ((run.inputs, False), (run.returns, True)):
                tools.inflows += [self._inflow(run, flow, back) for flow in flows if flow.peer != self.program.device]

    def _channel(self, run: StageRun, flow: Flow) -> Any:
        low, high = sorted((run.number, flow.run))
        return self.network.channel(f"{self.program.job.name} runs {low} and {high}", flow.peer)

    def _dims(self, flow: Flow) -> list[int]:
        return [self.pieces.batch_dims[name] for name in flow.tensors]

    def _sender(self, run: StageRun, flow: Flow, own: Mapping[int, StageRun], *, back: bool) -> _Sender:
        if flow.peer == self.program.device:
            return _Local(self.inbox, run, own[flow.run], flow, self._dims(flow), back)
        return Outflow(self._channel(run, flow), run, flow, self._dims(flow), header=not back)

    def _inflow(self, run: StageRun, flow: Flow, back: bool) -> Inflow:
        return Inflow(
            self._channel(run, flow), run, flow, self._dims(flow), self.inbox,
            back=back, device=self.device, micro_batches=self.program.micro_batches,
        )  # fmt: skip

    # -- one step

    def step(
        self,
        number: int,
        samples: Sequence[int],
        get: Callable[[Sequence[int]], tuple[Example, Any]],
        judged: Callable[[float, float], None],
    ) -> None:
        """Run all actions of a step on the samples of the whole batch, which are given by number.

        `judged` is told the sum and the number of all losses that count here, as soon as they are known.
        """
        forwards = sum(tools.run.slices for tools in self._tools if tools.last and tools.run.counts)
        sums = _Sums(forwards * self.program.micro_batches, judged)
        for tools in self._tools:
            for inflow in tools.inflows:
                inflow.step()
        todo = list(self.program.actions)
        while todo:
            action = todo.pop(self._pick(todo))
            tools = self._tools[action.run]
            begin = perf_counter()
            if action.backward:
                self._backward(tools, action.micro_batch)
            else:
                self._forward(tools, action.micro_batch, number, samples, get, sums)
            if self.spans is not None:
                what = "backward" if action.backward else "forward"
                self.spans.append(WorkSpan(what, tools.run.number, action.micro_batch, begin, perf_counter()))
        for tools in self._tools:
            for sender in (*tools.outputs, *tools.gradients):
                sender.finish()

    def _pick(self, todo: Sequence[Action]) -> int:
        """Return the index of the next action.

        This is a later backward if its gradients are here first and its run has no earlier action.
        """
        choices, seen = [0], {todo[0].run}
        if not self.hooks.ordered and not todo[0].backward:
            for index in range(1, min(len(todo), 4 * len(self._tools))):
                if todo[index].backward and todo[index].run not in seen:
                    choices.append(index)
                seen.add(todo[index].run)
        return choices[self.inbox.first_ready([self._keys(todo[i], whole=i > 0) for i in choices])]

    def _keys(self, action: Action, *, whole: bool) -> list[Key]:
        """Return the keys an action waits for: of its first slice or, where it overtakes another, of all slices."""
        run = self._tools[action.run].run
        return [(run.number, action.backward, action.micro_batch, k) for k in range(run.slices if whole else 1)]

    def _forward(
        self, tools: _Tools, m: int, step: int, samples: Sequence[int], get: Callable[..., Any], sums: _Sums
    ) -> None:
        run, size = tools.run, self.program.micro_batch
        for k in range(run.slices):
            lo, hi = samples_of_slice(run, k)
            first = m * size + lo
            numbers = samples[first : first + hi - lo]
            places = range(step * self.program.job.batch + first, step * self.program.job.batch + first + hi - lo)
            parts = self.inbox.take((run.number, False, m, k))
            self.hooks.pace.start()
            known: dict[str, Any] = self._joined(parts)
            target = None
            if tools.fed or tools.last:
                example, target = get(numbers)
                known |= self.pieces.bind(example.args, example.kwargs)
            stretches = [self._stretch(tools, stretch, known, step, places) for stretch in range(len(run.stretches))]
            loss, count = self._judge(known, target, stretches[-1]) if tools.last else (None, None)
            self.hooks.pace.keep()
            if tools.run.counts and loss is not None and count is not None:
                sums.add(loss, count)
            for sender in tools.outputs:
                sender.send(m, k, [known[name] for name in sender.flow.tensors], lo, hi)
            self._learn(tools, known, hi - lo)
            self._saved[run.number, m, k] = _Saved(stretches, loss, lo, hi)

    def _stretch(
        self, tools: _Tools, stretch: int, known: dict[str, Any], step: int, places: Sequence[int]
    ) -> _Stretch:
        """Run the blocks of a stretch, and add their results to `known`."""
        found, inside = _Stretch({}, {}), {}
        self.hooks.watch.before(tools.run, stretch, False)
        for unit in self._units(tools, stretch, len(places)):
            for name in unit.incoming:
                if name not in inside:
                    inside[name] = self._begun(name, known[name], found)
            given = self._unit(tools, unit, [inside[name] for name in unit.incoming], step, places)
            named = dict(zip(unit.outgoing, given, strict=True))
            named = {
                name: tensor.clone() if self.hooks.watch.holds(tensor) else tensor for name, tensor in named.items()
            }
            inside |= named
            kept = {name: tensor for name, tensor in named.items() if name in tools.kept[stretch]}
            found.outputs |= {name: tensor for name, tensor in kept.items() if tensor.requires_grad}
        self.hooks.watch.after(tools.run, stretch, False)
        known |= inside
        return found

    def _begun(self, name: str, tensor: Any, stretch: _Stretch) -> Any:
        """Return a tensor as a stretch begins with it: detached, as gradients between stretches are passed by hand."""
        if name in stretch.inputs:
            return stretch.inputs[name]
        if name not in self._grad or not tensor.is_floating_point():
            return tensor
        stretch.inputs[name] = tensor.detach().requires_grad_()
        return stretch.inputs[name]

    def _units(self, tools: _Tools, stretch: int, samples: int) -> Sequence[Unit]:
        """Return the units that a stretch is computed in: its blocks, or compiled ones once all blocks were checked."""
        calls, run = self.hooks.calls, tools.run
        first, last = run.stretches[stretch]
        blocks = range(first, last + 1)
        if calls.compiler is None or any(self._apart.wanted(run, block, samples) for block in blocks):
            return [calls.single(block) for block in blocks]
        if stretch not in tools.compiled:
            later = {name for block in range(last + 1, run.last + 1) for name in self.pieces.incoming[block]}
            wanted = later | tools.wanted | tools.kept[stretch]
            modules = tools.modules[first - run.first : last + 1 - run.first]
            apart = any(run.recompute[first - run.first : last + 1 - run.first])  # blocks are recomputed one by one
            tools.compiled[stretch] = calls.units(first, modules, wanted, apart)
        return tools.compiled[stretch]

    def _unit(self, tools: _Tools, unit: Unit, taken: list[Any], step: int, places: Sequence[int]) -> Sequence[Any]:
        position = unit.first - tools.run.first
        module, calls = tools.modules[position], self.hooks.calls
        if self._apart.wanted(tools.run, unit.first, len(places)):
            self._apart.compare(unit.first, module, taken, places, partial(calls.of, step, unit.first, module))
        compute = calls.of_unit(step, unit, module, places)
        if tools.run.recompute[position]:
            again = partial(_recomputing, module)
            return checkpoint(compute, *taken, use_reentrant=False, preserve_rng_state=False, context_fn=again)  # type: ignore[no-any-return]
        return compute(*taken)

    def _judge(self, known: dict[str, Any], target: Any, stretch: _Stretch) -> tuple[Tensor, Tensor]:
        """Return the sum and the count of the losses.

        An output that another run produces is not available here; if the loss uses it, an error says so.
        """
        outputs: dict[str, Any] = {}
        for name in (leaf for leaf in self.pieces.outputs if isinstance(leaf, str)):
            tensor = known.get(name, _Elsewhere(name))
            began = name in known and name not in stretch.outputs
            outputs[name] = self._begun(name, tensor, stretch) if began else tensor
        return self.loss(self.pieces.result(outputs), target)

    def _backward(self, tools: _Tools, m: int) -> None:
        run, watch = tools.run, self.hooks.watch
        for k in range(run.slices):
            saved = self._saved.pop((run.number, m, k))
            parts = self.inbox.take((run.number, True, m, k))
            self.hooks.pace.start()
            last = m == self.program.micro_batches - 1 and k == run.slices - 1
            if last:
                watch.final(run, True)
            gradients = self._stretches_back(tools, saved, parts)
            self.hooks.pace.keep()
            if last:
                watch.final(run, False)
            for sender in tools.gradients:
                sender.send(m, k, [gradients[name] for name in sender.flow.tensors], saved.lo, saved.hi)

    def _stretches_back(self, tools: _Tools, saved: _Saved, parts: Sequence[FlowPart]) -> dict[str, Tensor]:
        """Run the backward of the stretches, last to first, and return the gradients of what they began with."""
        gradients: dict[str, Tensor] = {}
        for stretch in reversed(range(len(saved.stretches))):
            found = saved.stretches[stretch]
            roots, seeds = [], []
            for name, tensor in found.outputs.items():
                seed = gradients.get(name)
                if name in tools.returned:
                    come = _gradient(tensor, self.pieces.batch_dims[name], name, parts, saved.lo, saved.hi)
                    seed = come if seed is None else seed + come
                if seed is not None:
                    roots.append(tensor)
                    seeds.append(seed)
            if stretch == len(saved.stretches) - 1 and saved.loss is not None and saved.loss.requires_grad:
                roots.append(saved.loss)
                seeds.append(torch.full_like(saved.loss, self.seed))
            self.hooks.watch.before(tools.run, stretch, True)
            if roots:
                torch.autograd.backward(roots, seeds)
            self.hooks.watch.after(tools.run, stretch, True)
            for name, leaf in found.inputs.items():
                own = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                gradients[name] = gradients[name] + own if name in gradients else own
        return gradients

    def _joined(self, parts: Sequence[FlowPart]) -> dict[str, Any]:
        """Return the whole tensors of a slice, joined from the parts that came."""
        by_name: dict[str, list[Tensor]] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                by_name.setdefault(name, []).append(tensor)
        dims = self.pieces.batch_dims
        return {
            name: found[0] if len(found) == 1 or dims[name] < 0 else torch.cat(found, dims[name])
            for name, found in by_name.items()
        }

    def _learn(self, tools: _Tools, outputs: Mapping[str, Any], samples: int) -> None:
        """Tell the inflows of gradients their form, which is that of the tensors that were sent."""
        for inflow in tools.inflows:
            if inflow.back:
                tensors = [outputs[name] for name in inflow.flow.tensors]
                inflow.learn(FlowForm.of(tensors, inflow.dims, samples))

    def close(self) -> None:
        """End the receiving threads."""
        for tools in self._tools:
            for inflow in tools.inflows:
                inflow.close()


def _recomputing(module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward and of its recomputation; what it counts (batch statistics) counts once."""
    return nullcontext(), unchanged(module)


class _Elsewhere:
    """An output of the model that another worker produces; a loss that uses it fails instead of ignoring it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise ModelError(
            "the loss uses an output of the model that is made in an earlier stage",
            found=f"output {self._name}",
            expected="outputs of the last stage",
            next="Give the loss what the last block makes, or use a plan whose last stage makes this output too",
        )


class _Sums:
    """Adds up the losses that count, and reports them when all have come."""

    def __init__(self, expected: int, judged: Callable[[float, float], None]) -> None:
        self._missing, self._judged = expected, judged
        self._losses: list[tuple[Tensor, Tensor]] = []

    def add(self, total: Tensor, count: Tensor) -> None:
        """Add the loss sum and count of one slice; nothing is copied from the device before the last slice."""
        self._losses.append((total.detach(), count.detach()))
        self._missing -= 1
        if self._missing == 0:
            self._judged(sum(float(t) for t, _ in self._losses), sum(float(c) for _, c in self._losses))


class _Local:
    """A flow between two runs of one worker, which copies nothing."""

    def __init__(
        self, inbox: Inbox, sender: StageRun, receiver: StageRun, flow: Flow, dims: Sequence[int], back: bool
    ) -> None:
        self.inbox, self.sender, self.receiver, self.flow, self.dims, self.back = (
            inbox, sender, receiver, flow, dims, back,
        )  # fmt: skip
        self._messages = messages(sender, receiver)
        for message in self._messages:
            inbox.expect(receiver.number, back, message.j)

    def send(self, micro_batch: int, k: int, tensors: Sequence[Tensor], lo: int, hi: int) -> None:
        """Hand the parts over to the receiving run."""
        for message in self._messages:
            if message.k == k:
                parts = {
                    name: cut(tensor.detach(), dim, hi - lo, message.lo - lo, message.hi - lo)
                    for name, tensor, dim in zip(self.flow.tensors, tensors, self.dims, strict=True)
                }
                key = (self.receiver.number, self.back, micro_batch, message.j)
                self.inbox.put(key, FlowPart(self.sender.number, message.lo, message.hi, message.lo == lo, parts))

    def finish(self) -> None:
        """Do nothing, because nothing is under way."""


_Sender = Outflow | _Local


def _gradient(tensor: Tensor, dim: int, name: str, parts: Sequence[FlowPart], lo: int, hi: int) -> Tensor:
    """Return the sum of the gradients that the users of a tensor sent back for samples [lo, hi).

    A tensor without batch dimension gets the gradient of each user once: from the part with which its slice begins.
    """
    found = [(part, part.tensors[name]) for part in parts if name in part.tensors]
    if dim < 0:
        found = [(part, gradient) for part, gradient in found if part.first]
    whole = dim < 0 or (len(found) == 1 and (found[0][0].lo, found[0][0].hi) == (lo, hi))
    if whole and len(found) == 1:
        return found[0][1]
    total = torch.zeros_like(tensor)
    for part, gradient in found:
        (total if dim < 0 else cut(total, dim, hi - lo, part.lo - lo, part.hi - lo)).add_(gradient)
    return total
