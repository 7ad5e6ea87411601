"""Make dropout and the like a function of seed, step, sample and operation, never of a device's random stream.

Every operation that would draw from the device's generator is computed from a hash of (seed, step, block, which random
operation of the block, sample, element within the sample) instead. The numbers are the same whatever the shares, the
slices and the device, in the first run and in a recomputation. The random operations of a block, and the dimension of
the samples in what they draw, are known beforehand (`draws.py`).

Blocks whose graph has dropout and attention only take the keys of their operations (`Randomness.keys`) as an input
(`runtime/block_functions.py`). Any other block runs inside `Randomness.at`, which watches its operations and replaces
those that draw; operations that cannot be computed this way are refused. Attention with dropout is then computed by its
plain formula: the fused kernels draw their own numbers inside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.errors import ModelError
from isthmus.model.graph import BlockGraph
from isthmus.model.trace import bound
from isthmus.runtime.random.draws import Draw, active, draws_itself, refused
from isthmus.runtime.random.hashed import Lot, Numbers, sample_keys
from isthmus.runtime.random.plain_attention import PlainAttention

__all__ = ["Randomness"]

_MAX = (1 << 64) - 1
_KEPT = 4  # sets of keys: of the samples that runs of one worker compute in turns


def _numbers(samples: Sequence[int]) -> Numbers:
    return np.array([number & _MAX for number in samples], dtype=np.uint64)


class Randomness:
    """The random numbers of a model's blocks, in every step of a job.

    `draws` are the random operations of each block (`draws_of`). A member of a tensor group passes them with its
    `split`.
    """

    def __init__(
        self, seed: int, graph: BlockGraph, draws: Sequence[Sequence[Draw]], own: Iterable[int] | None = None
    ) -> None:
        """Draw for the blocks `own` of the model; None: for all of them."""
        self._seed, self._names, self._draws = seed, [block.name for block in graph.blocks], draws
        self._followed = graph.how == "export"  # the graph shows all random operations; other blocks are always watched
        self._first: dict[int, int] = {}  # the number of each block's first operation, among all
        self._count = 0  # operations of all blocks
        for block in range(len(draws)) if own is None else sorted({*own}):
            self._first[block] = self._count
            self._count += len(draws[block])
        self._bases: tuple[int, list[int]] = (-1, [])  # of one step
        self._made: OrderedDict[Any, Tensor] = OrderedDict()  # keys of all blocks, by step and samples

    def keys(self, step: int, first: int, last: int, samples: Sequence[int], device: torch.device) -> Tensor | None:
        """Return the keys of all random operations of blocks `first` to `last`, [operations, samples, 2], if any.

        They are made for all blocks at once, as the next blocks will want theirs for the same samples.
        """
        low, high = self._first[first], self._first[last] + len(self._draws[last])
        if low == high:
            return None
        which = (step, samples if isinstance(samples, range) else tuple(samples), device)
        if which not in self._made:
            if self._bases[0] != step:
                each = [(b, index) for b in self._first for index in range(len(self._draws[b]))]
                self._bases = step, [self._base(f"{self._seed} {step} {self._names[b]}", index) for b, index in each]
            host = torch.from_numpy(sample_keys(self._bases[1], _numbers(samples)))
            self._made[which] = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
            while len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return self._made[which][low:high]

    @staticmethod
    def _base(key: str, index: int) -> int:
        """Return the hash of everything but sample and element, for operation number `index` of a block."""
        return int.from_bytes(blake2b(f"{key} {index}".encode(), digest_size=8).digest(), "little")

    def draws(self, block: int) -> Sequence[Draw]:
        """Return the block's random operations."""
        return self._draws[block]

    def needed(self, block: int) -> bool:
        """Return whether the block draws any random numbers."""
        return bool(self._draws[block])

    def at(self, step: int, block: int, samples: Sequence[int]) -> AbstractContextManager[None]:
        """Enter a context in which block number `block` may run once on these samples.

        Entered again, it gives the same numbers again.
        """
        if self._followed and not self._draws[block]:
            return nullcontext()
        return self._drawing(step, block, samples)

    @contextmanager
    def _drawing(self, step: int, block: int, samples: Sequence[int]) -> Iterator[None]:
        name, draws = self._names[block], self._draws[block]
        attends = not self._followed or any(draw.operation == "scaled_dot_product_attention" for draw in draws)
        with (
            _Drawing(f"{self._seed} {step} {name}", name, draws, _numbers(samples)),
            PlainAttention() if attends else nullcontext(),
        ):
            yield


class _Drawing(TorchDispatchMode):
    """Replaces the device's random numbers by hashed ones for every random operation of one run of a block."""

    def __init__(self, key: str, block: str, draws: Sequence[Draw], samples: Numbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key, self._block, self._draws, self._samples = key, block, draws, samples
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws_itself(func) or not active(func, args, kwargs):
            return func(*args, **kwargs)
        rule = _RULES.get(str(func))
        given = bound(func, args, kwargs)
        if rule is None or given.get("generator") is not None:
            raise refused(self._block, str(func))
        index, self._next = self._next, self._next + 1
        if index >= len(self._draws):
            raise ModelError(
                "a block draws more often than when it was looked at",
                where=f"block {self._block}",
                found=f"{func} as draw {index + 1}",
                expected=f"{len(self._draws)} random operations, whatever the samples",
            )
        lot = Lot(Randomness._base(self._key, index), self._block, self._draws[index], self._samples)
        return rule(lot, **given)


# -- the operations


def _native_dropout(lot: Lot, *, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    kept = lot.chance(1 - p, input.shape, input.device)
    return input * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _bernoulli_(lot: Lot, *, self: Tensor, p: float | Tensor, generator: None) -> Tensor:
    return self.copy_(lot.chance(p, self.shape, self.device))


def _bernoulli(lot: Lot, *, self: Tensor, generator: None, p: float | None = None) -> Tensor:
    return lot.chance(self if p is None else p, self.shape, self.device).to(self.dtype)


def _uniform_(lot: Lot, *, self: Tensor, generator: None, to: float, **others: float) -> Tensor:
    low = others["from"]
    return self.copy_(lot.uniform(self.shape, self.device, self.dtype) * (to - low) + low)


def _exponential_(lot: Lot, *, self: Tensor, lambd: float, generator: None) -> Tensor:
    return self.copy_(-torch.log1p(-lot.uniform(self.shape, self.device, torch.float64)) / lambd)


def _normal_(lot: Lot, *, self: Tensor, mean: float, std: float, generator: None) -> Tensor:
    return self.copy_(lot.normal(self.shape, self.device) * std + mean)


def _normal(lot: Lot, *, mean: float, std: float, size: Any, generator: None, **form: Any) -> Tensor:
    return _normal_(lot, self=_empty(size, form), mean=mean, std=std, generator=None)


def _rand(lot: Lot, *, size: Any, **form: Any) -> Tensor:
    made = _empty(size, form)
    return made.copy_(lot.uniform(made.shape, made.device, made.dtype))


def _randn(lot: Lot, *, size: Any, **form: Any) -> Tensor:
    made = _empty(size, form)
    return made.copy_(lot.normal(made.shape, made.device))


def _randint(lot: Lot, *, size: Any, high: int, low: int = 0, **form: Any) -> Tensor:
    made = _empty(size, {"dtype": torch.int64} | _given(form))
    return made.copy_(lot.integer(low, high, made.shape, made.device))


def _rand_like(lot: Lot, *, self: Tensor, **form: Any) -> Tensor:
    made = torch.empty_like(self, **_given(form))
    return made.copy_(lot.uniform(made.shape, made.device, made.dtype))


def _randn_like(lot: Lot, *, self: Tensor, **form: Any) -> Tensor:
    made = torch.empty_like(self, **_given(form))
    return made.copy_(lot.normal(made.shape, made.device))


def _randint_like(lot: Lot, *, self: Tensor, high: int, low: int = 0, **form: Any) -> Tensor:
    made = torch.empty_like(self, **_given(form))
    return made.copy_(lot.integer(low, high, made.shape, made.device))


def _empty(size: Sequence[int], form: dict[str, Any]) -> Tensor:
    return torch.empty(size, **_given(form))


def _given(form: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments of a tensor's form, without None and without dtypes given as numbers (defaults)."""
    return {key: value for key, value in form.items() if value is not None and (key, type(value)) != ("dtype", int)}


_RULES: dict[str, Callable[..., Any]] = {
    "aten.native_dropout.default": _native_dropout,
    "aten.bernoulli_.float": _bernoulli_,
    "aten.bernoulli_.Tensor": _bernoulli_,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.default": _bernoulli,
    "aten.uniform_.default": _uniform_,
    "aten.exponential_.default": _exponential_,
    "aten.normal_.default": _normal_,
    "aten.normal.float_float": _normal,
    "aten.rand.default": _rand,
    "aten.randn.default": _randn,
    "aten.randint.default": _randint,
    "aten.randint.low": _randint,
    "aten.rand_like.default": _rand_like,
    "aten.randn_like.default": _randn_like,
    "aten.randint_like.default": _randint_like,
    "aten.randint_like.low_dtype": _randint_like,
}
