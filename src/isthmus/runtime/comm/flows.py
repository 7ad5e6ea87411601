"""What passes between runs: activations forwards and their gradients back, by intersection of samples.

A *form* is the dtype and shape of each tensor of a flow for some number of samples. Along its batch dimension a tensor
grows with the samples, so one form describes all. The receiver of activations learns the form from a header before the
first message; the receiver of gradients learns it from its own activations. From then on receives are posted ahead,
which hides the message with which Gloo's receivers announce that they are ready.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import ModelError
from isthmus.plan.ring import AHEAD, LEAVING
from isthmus.runtime.comm.channel import Channel, Work
from isthmus.runtime.program import Flow, StageRun, samples_of_slice

__all__ = ["FlowForm", "FlowPart", "Inbox", "Inflow", "Message", "Outflow", "messages"]

HEADER = 0  # tag
_DIMS = 8  # dimensions of a tensor that fit into a header
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


@dataclass(frozen=True)
class Message:
    """Samples [lo, hi) of a micro-batch, from slice k of the sender to slice j of the receiver."""

    k: int
    j: int
    lo: int
    hi: int

    def tag(self, micro_batch: int) -> int:
        """Return a tag that is unique within the flow and the step."""
        return 1 + (micro_batch << 20 | self.k << 10 | self.j)


def messages(sender: StageRun | Flow, receiver: StageRun | Flow) -> tuple[Message, ...]:
    """Return the messages of one micro-batch: one for every pair of slices that has samples in common."""
    found = []
    for k in range(sender.slices):
        lo, hi = samples_of_slice(sender, k)
        for j in range(receiver.slices):
            low, high = samples_of_slice(receiver, j)
            if max(lo, low) < min(hi, high):
                found.append(Message(k, j, max(lo, low), min(hi, high)))
    return tuple(found)


class FlowForm:
    """Dtypes, shapes and batch dimensions (-1: none) of a flow's tensors, for a known number of samples."""

    def __init__(
        self, samples: int, tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]], dims: Sequence[int]
    ) -> None:
        self.samples, self.tensors, self.dims = samples, tuple(tensors), tuple(dims)

    @staticmethod
    def of(tensors: Sequence[Tensor], dims: Sequence[int], samples: int) -> FlowForm:
        """Return the form of these tensors."""
        return FlowForm(samples, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors], dims)

    def shapes(self, samples: int) -> list[tuple[int, ...]]:
        """Return the shape of each tensor for another number of samples."""
        return [
            shape if dim < 0 else (*shape[:dim], shape[dim] // self.samples * samples, *shape[dim + 1 :])
            for (_, shape), dim in zip(self.tensors, self.dims, strict=True)
        ]

    def bytes(self, samples: int) -> int:
        """Return the size in bytes of a message with this number of samples."""
        sizes = (torch.Size(shape).numel() for shape in self.shapes(samples))
        return sum(size * dtype.itemsize for size, (dtype, _) in zip(sizes, self.tensors, strict=True))

    def header(self) -> Tensor:
        """Return the form as numbers: samples, then for each tensor its dtype, its dimensions and their sizes."""
        numbers = [self.samples]
        for dtype, shape in self.tensors:
            if dtype not in _DTYPES or len(shape) > _DIMS:
                raise ModelError(
                    "a tensor between stages cannot be sent",
                    found=f"{dtype} of {len(shape)} dimensions",
                    expected=f"at most {_DIMS} dimensions of {', '.join(str(known) for known in _DTYPES)}",
                )
            numbers += [_DTYPES.index(dtype), len(shape), *shape, *[0] * (_DIMS - len(shape))]
        return torch.tensor(numbers, dtype=torch.int64)

    @staticmethod
    def room(tensors: int) -> Tensor:
        """Return an empty tensor that receives a header for this number of tensors."""
        return torch.empty(1 + tensors * (2 + _DIMS), dtype=torch.int64)

    @staticmethod
    def read(header: Tensor, dims: Sequence[int]) -> FlowForm:
        """Return the form that a header made by `header` describes."""
        samples, *numbers = header.tolist()
        tensors = []
        for at in range(0, len(numbers), 2 + _DIMS):
            dtype, size = numbers[at : at + 2]
            tensors.append((_DTYPES[dtype], tuple(numbers[at + 2 : at + 2 + size])))
        return FlowForm(samples, tensors, dims)

    def like(self, other: FlowForm) -> bool:
        """Return whether both forms are the same, apart perhaps from their number of samples."""
        dtypes = [[dtype for dtype, _ in form.tensors] for form in (self, other)]
        return dtypes[0] == dtypes[1] and self.shapes(self.samples) == other.shapes(self.samples)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors' bytes in a row."""
        rows = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def unpack(self, buffer: Tensor, samples: int) -> list[Tensor]:
        """Return tensors that are views of the buffer; one that would be misaligned is copied."""
        found, at = [], 0
        for shape, (dtype, _) in zip(self.shapes(samples), self.tensors, strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            row = buffer[at : at + size]
            found.append((row.clone() if at % dtype.itemsize else row).view(dtype).view(shape))
            at += size
        return found


@dataclass(frozen=True)
class FlowPart:
    """Tensors of a flow for samples [lo, hi), by name."""

    run: int  # the run that sent them
    lo: int
    hi: int
    first: bool  # the sender's slice begins with these samples
    tensors: Mapping[str, Tensor]


Key = tuple[int, bool, int, int]  # run, whether gradients, micro-batch, slice


class Inbox:
    """Parts that have come, by what waits for them; an error anywhere wakes all waiting threads."""

    def __init__(self) -> None:
        self._come = threading.Condition()
        self._parts: dict[Key, list[FlowPart]] = {}
        self._need: dict[tuple[int, bool, int], int] = {}
        self._failure: BaseException | None = None

    def expect(self, run: int, back: bool, slice_: int) -> None:
        """Expect one more part for this slice in every micro-batch."""
        key = (run, back, slice_)
        self._need[key] = self._need.get(key, 0) + 1

    def put(self, key: Key, part: FlowPart) -> None:
        """Add a part that has come."""
        with self._come:
            self._parts.setdefault(key, []).append(part)
            self._come.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Report an error after which nothing more will come."""
        with self._come:
            self._failure = self._failure or failure
            self._come.notify_all()

    def _ready(self, key: Key) -> bool:
        need = self._need.get((key[0], key[1], key[3]), 0)
        return need == 0 or len(self._parts.get(key, ())) == need

    def first_ready(self, choices: Sequence[Sequence[Key]]) -> int:
        """Wait until all keys of a choice have all their parts, and return the index of the first such choice."""
        with self._come:
            while True:
                if self._failure is not None:
                    raise self._failure
                for index, keys in enumerate(choices):
                    if all(map(self._ready, keys)):
                        return index
                self._come.wait()

    def take(self, key: Key) -> list[FlowPart]:
        """Wait for all parts of a key and return them in the order of their samples."""
        self.first_ready([[key]])
        with self._come:
            return sorted(self._parts.pop(key, []), key=lambda part: (part.lo, part.run))


class Outflow:
    """The sending end of a flow."""

    def __init__(self, channel: Channel, sender: StageRun, flow: Flow, dims: Sequence[int], *, header: bool) -> None:
        self.channel, self.flow, self.dims = channel, flow, dims
        self.by_slice: dict[int, list[Message]] = {}
        for message in messages(sender, flow):
            self.by_slice.setdefault(message.k, []).append(message)
        self._header = header
        self._form: FlowForm | None = None
        self._pending: deque[Work] = deque()

    def send(self, micro_batch: int, k: int, tensors: Sequence[Tensor], lo: int, hi: int) -> None:
        """Send the messages of slice k, cut from tensors that hold the samples [lo, hi)."""
        form = FlowForm.of(tensors, self.dims, hi - lo)
        self._form = self._form or form
        if not self._form.like(form):
            raise ModelError(
                "tensors between stages have other shapes than before",
                where=f"to {self.flow.peer}",
                found=", ".join(str(list(tensor.shape)) for tensor in tensors),
                expected=", ".join(str(list(shape)) for shape in self._form.shapes(hi - lo)),
                next="Give every batch samples of one shape: pad sequences to one length",
            )
        if self._header:
            self._header = False
            self._post(self.channel.send(form.header(), HEADER))
        for message in self.by_slice.get(k, ()):
            parts = [
                cut(tensor, dim, hi - lo, message.lo - lo, message.hi - lo)
                for tensor, dim in zip(tensors, self.dims, strict=True)
            ]
            packed = form.pack(parts)
            self._post(self.channel.send(packed, message.tag(micro_batch)))

    def _post(self, work: Work) -> None:
        self._pending.append(work)
        while len(self._pending) > LEAVING:
            self._pending.popleft().wait()

    def finish(self) -> None:
        """Wait until everything is sent."""
        while self._pending:
            self._pending.popleft().wait()


def cut(tensor: Tensor, dim: int, samples: int, lo: int, hi: int) -> Tensor:
    """Return samples [lo, hi) of a tensor that holds `samples`; all of it if it has no batch dimension."""
    if dim < 0 or (lo, hi) == (0, samples):
        return tensor
    rows = tensor.shape[dim] // samples
    return tensor.narrow(dim, lo * rows, (hi - lo) * rows)


class Inflow:
    """The receiving end of a flow: a thread that posts receives ahead and puts parts into the inbox."""

    def __init__(
        self, channel: Channel, receiver: StageRun, flow: Flow, dims: Sequence[int], inbox: Inbox, *,
        back: bool, device: torch.device, micro_batches: int,
    ) -> None:  # fmt: skip
        self.channel, self.receiver, self.flow, self.dims, self.inbox = channel, receiver, flow, dims, inbox
        self.back, self.device, self.micro_batches = back, device, micro_batches
        self.messages = messages(flow, receiver)
        self._form: FlowForm | None = None
        self._known = threading.Event()
        self._steps = threading.Semaphore(0)
        self._open = True
        for message in self.messages:
            inbox.expect(receiver.number, back, message.j)
        self._thread = threading.Thread(target=self._run, name=f"from {flow.peer}", daemon=True)
        self._thread.start()

    def learn(self, form: FlowForm) -> None:
        """Set the form; only the first call counts."""
        if self._form is None:
            self._form = form
            self._known.set()

    def step(self) -> None:
        """Let the messages of one more step come in."""
        self._steps.release()

    def close(self) -> None:
        """End the thread once no step is under way."""
        self._open = False
        self._known.set()
        self._steps.release()

    def _run(self) -> None:
        try:
            self._steps.acquire()
            if not self._open:
                return
            if not self.back:
                header = FlowForm.room(len(self.flow.tensors))
                self.channel.receive(header, HEADER).wait()
                self.learn(FlowForm.read(header, self.dims))
            self._known.wait()
            while self._open:
                self._receive_step()
                self._steps.acquire()
        except BaseException as failure:
            if self._open:
                self.inbox.fail(failure)

    def _receive_step(self) -> None:
        form = self._form
        assert form is not None
        posted: deque[tuple[int, Message, Tensor, Work]] = deque()
        for micro_batch, message in self._expected():
            buffer = torch.empty(form.bytes(message.hi - message.lo), dtype=torch.uint8, device=self.device)
            posted.append((micro_batch, message, buffer, self.channel.receive(buffer, message.tag(micro_batch))))
            if len(posted) > AHEAD:
                self._deliver(form, *posted.popleft())
        while posted:
            self._deliver(form, *posted.popleft())

    def _expected(self) -> Iterator[tuple[int, Message]]:
        return ((m, message) for m in range(self.micro_batches) for message in self.messages)

    def _deliver(self, form: FlowForm, micro_batch: int, message: Message, buffer: Tensor, work: Work) -> None:
        work.wait()
        tensors = form.unpack(buffer, message.hi - message.lo)
        named = dict(zip(self.flow.tensors, tensors, strict=True))
        first = samples_of_slice(self.flow, message.k)[0] == message.lo
        key = (self.receiver.number, self.back, micro_batch, message.j)
        self.inbox.put(key, FlowPart(self.flow.run, message.lo, message.hi, first, named))
