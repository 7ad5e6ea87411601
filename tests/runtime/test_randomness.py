"""Randomness by sample: against a second implementation, whatever the split, and how random it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isthmus.errors import ModelError
from isthmus.model.runnable_blocks import Pieces, cut
from isthmus.model.torch_export import Example
from isthmus.model.zoo.gpt import GPT
from isthmus.runtime.random.draws import Draw, Split, draws_of
from isthmus.runtime.random.hashed import Lot
from isthmus.runtime.random.randomness import Randomness

from ..model import models

CPU = torch.device("cpu")


def lot(samples: Sequence[int], *, base: int = 5, dim: int = 0, split: Split | None = None) -> Lot:
    return Lot(base, "b", Draw(operation="dropout", dim=dim, split=split), np.array(samples, dtype=np.uint64))


# -- the numbers


def finished(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def bits(base: int, sample: int, element: int) -> int:
    """The hash in plain integers, counted from 0."""
    key = finished((finished((sample + 0x9E3779B97F4A7C15) % 2**64) + base) % 2**64)
    a, b = key % 2**32, key >> 32
    x = (element * 0x9E3779B1 + a) % 2**32
    x = ((x ^ x >> 16) * 0x7FEB352D + b) % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16 ^ 2**31


@given(
    base=st.integers(0, 2**64 - 1),
    samples=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4),
    p=st.floats(0, 1),
)
@settings(max_examples=20)
def test_against_plain_integers(base: int, samples: list[int], p: float) -> None:
    kept = lot(samples, base=base).chance(p, (len(samples), 3, 2), CPU)
    wanted = [[bits(base, s, e) < round(p * 2**32) for e in range(6)] for s in samples]
    assert kept.flatten(1).tolist() == wanted
    uniform = lot(samples, base=base).uniform((len(samples), 6), CPU, torch.float32)
    assert uniform.tolist() == [[(bits(base, s, e) >> 8) / 2**24 for e in range(6)] for s in samples]


@given(st.data())
@settings(max_examples=40)
def test_a_part_is_drawn_as_in_the_whole(data: st.DataObject) -> None:
    """Any samples, in any dimension, merged with another or not; a member's part of another dimension."""
    count, merged = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    others = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(others)))
    shape = [*others[:dim], count * merged, *others[dim:]]
    whole = lot(range(count), dim=dim).chance(0.5, shape, CPU)
    low = data.draw(st.integers(0, count - 1))
    high = data.draw(st.integers(low + 1, count))
    part = [*others[:dim], (high - low) * merged, *others[dim:]]
    found = lot(range(low, high), dim=dim).chance(0.5, part, CPU)
    assert torch.equal(found, whole.narrow(dim, low * merged, (high - low) * merged))
    along = data.draw(st.sampled_from([d for d in range(len(shape)) if d != dim]))
    start = data.draw(st.integers(0, shape[along] - 1))
    size = data.draw(st.integers(1, shape[along] - start))
    shape[along], split = size, Split(dim=along, start=start, whole=shape[along])
    found = lot(range(count), dim=dim, split=split).chance(0.5, shape, CPU)
    assert torch.equal(found, whole.narrow(along, start, size))


def chi_square(cells: Tensor) -> float:
    """How far counts are from equal, in deviations of the chi-square distribution."""
    expected = cells.sum() / cells.numel()
    freedom = cells.numel() - 1
    return float(((cells - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def test_masks_are_as_many_as_asked_for() -> None:
    for p in (0.1, 0.5, 0.9, 0.999):
        kept = lot(range(64)).chance(p, (64, 4096), CPU).double()
        assert abs(kept.mean() - p) < 4 * (p * (1 - p) / kept.numel()) ** 0.5
        rows = kept.sum(1)  # binomial: variance 4096 p (1 - p)
        assert 0.6 < rows.var() / (4096 * p * (1 - p)) < 1.5


def test_nothing_tells_samples_steps_operations_or_neighbours_from_each_other() -> None:
    """Pairs of bits fall into four equal cells, for neighbours in each thing that a number depends on."""

    def mask(base: int, first: int = 0) -> Tensor:
        return lot(range(first, first + 64), base=base).chance(0.5, (64, 512), CPU)

    one = mask(1)
    pairs = {
        "operations": (one, mask(2)),
        "far operations": (one, mask(1 + 2**32)),
        "samples": (one, mask(1, 1)),
        "far samples": (one, mask(1, 2**32)),
        "elements": (one[:, ::2], one[:, 1::2]),
        "rows of an image": (one[:, :-16], one[:, 16:]),
        "halves": (one[:, :256], one[:, 256:]),
    }
    for name, (a, b) in pairs.items():
        cells = torch.bincount((a.int() * 2 + b.int()).flatten(), minlength=4).double()
        assert abs(chi_square(cells)) < 4, name
    words = one.view(-1, 8).int() @ (2 ** torch.arange(8, dtype=torch.int32))
    assert abs(chi_square(torch.bincount(words, minlength=256).double())) < 4


def test_other_distributions() -> None:
    shape, n = (64, 1024), 64 * 1024
    uniform = lot(range(64)).uniform(shape, CPU, torch.float64)
    assert abs(chi_square(torch.histc(uniform, 64, 0, 1))) < 4
    normal = lot(range(64)).normal(shape, CPU)
    assert abs(normal.mean()) < 4 / n**0.5 and abs(normal.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs(float((normal.abs() < 1).double().mean()) - 0.6827) < 0.01 and abs((normal**4).mean() - 3) < 0.2
    whole = lot(range(64)).integer(-3, 7, shape, CPU)
    assert abs(chi_square(torch.bincount((whole + 3).flatten(), minlength=10).double())) < 4
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        small = lot(range(64)).uniform(shape, CPU, dtype)
        assert small.dtype == dtype and small.min() >= 0 and small.max() < 1
    chances = torch.linspace(0, 1, 5).expand(64, 5)
    kept = lot(range(64)).chance(chances, (64, 5), CPU).double().mean(0)
    assert kept[0] == 0 and kept[4] == 1 and bool(((kept - torch.linspace(0, 1, 5)).abs() < 0.25).all())


# -- in a model


class Trial:
    """A model in pieces that draw by sample."""

    def __init__(self, model: nn.Module, *inputs: Tensor, seed: int = 0) -> None:
        example = Example(args=tuple(value[:2] for value in inputs))
        self.pieces: Pieces = cut(model.train(), example, name="m")
        self.draws = draws_of(self.pieces, example)
        self.randomness = Randomness(seed, self.pieces.graph, self.draws)

    def run(self, samples: Sequence[int], *inputs: Tensor, step: int = 0, recompute: bool = False) -> Tensor:
        known = self.pieces.bind(inputs, {})
        for block, module in enumerate(self.pieces.blocks):

            def compute(*taken: Any, block: int = block, module: nn.Module = module) -> Any:
                with self.randomness.at(step, block, samples):
                    return module(*taken)

            taken = [known[name] for name in self.pieces.incoming[block]]
            again = {"use_reentrant": False, "preserve_rng_state": False}
            outputs = checkpoint(compute, *taken, **again) if recompute else compute(*taken)
            known |= zip(self.pieces.outgoing[block], outputs, strict=True)
        result: Tensor = self.pieces.result(known)
        return result


def assert_same_whatever_the_split(trial: Trial, x: Tensor) -> None:
    whole = trial.run(range(len(x)), x)
    parts = [trial.run(range(low, high), x[low:high]) for low, high in ((0, 1), (1, 4), (4, len(x)))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(whole, trial.run(range(len(x)), x, step=1), rtol=1e-3)
    assert not torch.allclose(whole, trial.run(range(1, len(x) + 1), x), rtol=1e-3)


@pytest.fixture(scope="module")
def gpt() -> Trial:
    torch.manual_seed(0)
    model = GPT(layers=2, width=16, heads=4, longest=8, vocabulary=50, dropout=0.25).double()
    return Trial(model, models.ids(2, length=8))


def test_a_gpt_with_dropout_everywhere(gpt: Trial) -> None:
    assert_same_whatever_the_split(gpt, models.ids(6, length=8))
    kinds = [draw.operation for draws in gpt.draws for draw in draws]
    assert kinds.count("scaled_dot_product_attention") == 2 and kinds.count("dropout") == 5
    assert [gpt.randomness.needed(block) for block in range(len(gpt.pieces.blocks))][-1] is False
    assert isinstance(gpt.randomness.at(0, len(gpt.pieces.blocks) - 1, [0]), contextlib.nullcontext)


def test_recomputation_draws_the_same(gpt: Trial) -> None:
    tokens, found = models.ids(3, length=8), []
    for recompute in (False, True):
        gpt.pieces.blocks[0].zero_grad()
        y = gpt.run(range(3), tokens, step=3, recompute=recompute)
        y.square().sum().backward()
        gradients = [p.grad.clone() for block in gpt.pieces.blocks for p in block.parameters() if p.grad is not None]
        found.append((y.detach(), gradients))
        for block in gpt.pieces.blocks:
            block.zero_grad()
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_the_devices_generator_is_not_asked(gpt: Trial) -> None:
    before = torch.get_rng_state()
    gpt.run(range(2), models.ids(2, length=8))
    assert torch.equal(before, torch.get_rng_state())


class Layout(nn.Module):
    """Dropout on tensors in which the samples lie elsewhere than in dimension 0."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.linear(x)
        if self.how == "second":
            return F.dropout(y.transpose(0, 1), 0.5).transpose(0, 1)
        if self.how == "merged":
            return F.dropout(y.reshape(batch * length, width), 0.5).view(batch, length, width)
        if self.how == "channels":
            return F.dropout1d(y, 0.5)
        if self.how == "noise":
            noise = torch.randn_like(y) + torch.rand(batch, 1, 1, dtype=y.dtype) + torch.empty_like(y).uniform_(2, 3)
            return y + noise + torch.randint(0, 9, (batch, length, 1)) + torch.normal(0.0, 1.0, y.shape)
        if self.how == "gumbel":
            return F.gumbel_softmax(y, dim=-1) + torch.bernoulli(y.sigmoid())
        return F.alpha_dropout(y, 0.5, training=True) + torch.native_dropout(y, 0.5, True)[0]


@pytest.mark.parametrize("how", ["second", "merged", "channels", "noise", "gumbel", "others"])
def test_wherever_the_samples_lie(how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 6, 8, dtype=torch.float64)  # as many positions as samples: sizes tell nothing
    assert_same_whatever_the_split(Trial(Layout(how).double(), x), x)


def test_child_modules_that_export_cannot_follow() -> None:
    class Second(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), models.PerSample(), Second(), nn.Dropout(0.5)).double()
    trial = Trial(model, torch.randn(6, 6, 8, dtype=torch.float64))
    assert trial.pieces.graph.how == "modules"
    assert [draw.dim for draws in trial.draws for draw in draws] == [1, 0]
    assert_same_whatever_the_split(trial, torch.randn(6, 6, 8, dtype=torch.float64))


def test_dropout_is_the_same_operation_on_every_device() -> None:
    """What a GPU computes for dropout (native_dropout) keeps what the CPU's way keeps."""
    x = torch.rand(4, 32) + 1

    class One(nn.Module):
        def __init__(self, native: bool) -> None:
            super().__init__()
            self.scale, self.native = nn.Parameter(torch.ones(32)), native

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            return torch.native_dropout(y, 0.3, True)[0] if self.native else F.dropout(y, 0.3)

    found = []
    for native in (False, True):
        trial = Trial(One(native), x)
        y = trial.run(range(4), x)
        y.sum().backward()
        found.append((y.detach(), dict(trial.pieces.blocks[0].named_parameters())["scale"].grad))
    torch.testing.assert_close(found[0], found[1])
    assert 0 < (found[0][0] == 0).sum() < 128


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.scale, self.options = nn.Parameter(torch.ones(())), options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * self.scale, k, v, dropout_p=0.3, **self.options)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_its_formula(causal: bool) -> None:
    """softmax(q k / sqrt(d)), of which some are dropped, times v; grouped queries and masks as torch has them."""
    q = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 5, 8, dtype=torch.float64).unbind()
    mask = None if causal else torch.rand(5, 5) < 0.7
    trial = Trial(Attends(is_causal=causal, attn_mask=mask, enable_gqa=True).double(), q, k, v)
    found = trial.run([7, 9], q, k, v, step=2)
    scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) / 8**0.5
    seen = torch.ones(5, 5).tril().bool() if mask is None else mask
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    name = trial.pieces.graph.blocks[0].name
    base = int.from_bytes(blake2b(f"0 2 {name} 0".encode(), digest_size=8).digest(), "little")
    kept = lot([7, 9], base=base).chance(0.7, weights.shape, CPU)
    torch.testing.assert_close(found, weights * kept / 0.7 @ v.repeat_interleave(2, dim=1))


def test_a_member_draws_its_heads_of_the_whole() -> None:
    q, k, v = torch.randn(3, 2, 8, 5, 4, dtype=torch.float64).unbind()
    whole = Trial(Attends().double(), q, k, v)
    wanted = whole.run([3, 4], q, k, v)
    for start, stop in ((0, 3), (3, 8)):
        part = tuple(t[:, start:stop].contiguous() for t in (q, k, v))
        member = Trial(Attends().double(), *part)
        ((draw,),) = member.draws
        split = Split(dim=1, start=start, whole=8)
        member.randomness = Randomness(0, member.pieces.graph, [[replace(draw, split=split)]])
        torch.testing.assert_close(member.run([3, 4], *part), wanted[:, start:stop])


class Odd(nn.Module):
    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self.linear(x))


class Loops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.dropout(row, 0.5) for row in x])


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "multinomial": (lambda: Odd(lambda x: x * torch.multinomial(x.exp(), 1)), "aten.multinomial.default"),
    "randperm": (lambda: Odd(lambda x: x[:, torch.randperm(4)]), "aten.randperm"),
    "rrelu": (lambda: Odd(lambda x: F.rrelu(x, training=True)), "aten.rrelu"),
    "for all samples": (lambda: Odd(lambda x: x * torch.rand(4)), "rand.default draws is not shaped by samples"),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), First()), "aten.lstm"),
    "each sample apart": (lambda: nn.Sequential(nn.Linear(4, 4), Loops()), "how often a block draws depends on"),
}


class First(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0]


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:The tensor attribute")  # export, of recurrent layers
def test_what_is_random_in_another_way_is_refused(case: str) -> None:
    build, text = REFUSED[case]
    x = torch.randn(3, 4) if case != "recurrent" else torch.randn(3, 5, 4)
    with pytest.raises(ModelError) as caught:
        Trial(build(), x)
    assert text in str(caught.value) and "block" in str(caught.value)


def test_a_generator_of_ones_own_and_a_surprise_are_refused() -> None:
    class Moody(nn.Module):
        """Draws another time when it is told to: as code that export cannot follow may."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mood = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            y = torch.stack([row * 1 for row in self.linear(x)])
            if self.mood == 2:
                return y + torch.empty_like(y).normal_(generator=torch.Generator())
            return F.dropout(F.dropout(y, 0.1), 0.1) if self.mood else F.dropout(y, 0.1)

    model, x = Moody(), torch.randn(3, 4)
    trial = Trial(model, x)
    trial.run(range(3), x)
    for mood, text in ((1, "draws more often"), (2, "without a generator")):
        model.mood = mood
        with pytest.raises(ModelError, match=text):
            trial.run(range(3), x)


def test_a_tensor_that_does_not_fit_the_samples_is_refused() -> None:
    with pytest.raises(ModelError, match=r"dropout draws is not shaped by samples. Found a tensor \[4, 2\] for 3"):
        lot(range(3)).chance(0.5, (4, 2), CPU)
