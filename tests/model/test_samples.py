"""Whether samples stay apart: what the rules say, beside what running a model whole and in parts shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from isthmus.errors import ModelError
from isthmus.model.capture import Example, capture
from isthmus.model.graph import BlockGraph
from tests.sample_models import APART, INPUTS, MIXING, UNFOLLOWED, WIDTH, WORDS, Body, SampleModel

WRONG = MIXING | UNFOLLOWED


def built(name: str, body: Callable[[], Body]) -> nn.Module:
    torch.manual_seed(0)
    return SampleModel(body(), words=name.startswith("words_"))


def captured(model: nn.Module) -> BlockGraph | None:
    """None where the model is refused as a whole."""
    try:
        return capture(model, Example(args=(torch.zeros(2, INPUTS),)), name="m")
    except ModelError:
        return None


def depends_on_others(model: nn.Module) -> bool:
    """Brute force: whether some sample's result changes if it is computed in other company."""
    torch.manual_seed(1)
    x = torch.randn(8, INPUTS)
    with torch.no_grad():
        whole = model(x)
        splits = ([3, 5], [5, 3], [6, 2])
        return any(not torch.allclose(whole, torch.cat([model(p) for p in x.split(s)]), atol=1e-5) for s in splits)


def test_there_are_many() -> None:
    assert len(WRONG) >= 90 and not WRONG.keys() & APART.keys()


@pytest.mark.parametrize("name", WRONG)
def test_what_mixes_samples_is_not_proven(name: str) -> None:
    model = built(name, WRONG[name])
    assert depends_on_others(model)
    graph = captured(model)
    assert graph is None or any(block.unproven for block in graph.blocks)


@pytest.mark.parametrize("name", APART)
def test_what_keeps_samples_apart_is_proven(name: str) -> None:
    model = built(name, APART[name])
    assert not depends_on_others(model)
    graph = captured(model)
    assert graph is not None and not any(block.mixes_samples for block in graph.blocks)


def test_the_line_of_code_is_named() -> None:
    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(INPUTS, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.roll(self.a(x), 1, 0)  # here

    (told,) = [told for block in captured(Rolled()).blocks for told in block.unproven]  # type: ignore[union-attr]
    assert told.startswith("roll (line ") and told.endswith(
        "of test_samples.py: return torch.roll(self.a(x), 1, 0)  # here)"
    )


def test_the_line_is_the_models_and_not_torchs() -> None:
    told = [
        told for block in captured(SampleModel(MIXING["attention over samples"]())).blocks for told in block.unproven
    ]  # type: ignore[union-attr]
    assert told and all("of sample_models.py: " in line for line in told)


class Table(nn.Module):
    """A table of numbers by which the inputs are looked up."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(8, WIDTH, scale_grad_by_freq=scaled), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.table(x.long().abs() % 8)).mean(1))


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_by_how_often_a_number_comes_are_not_proven(scaled: bool) -> None:
    """The batch is counted, though only backward."""
    graph = captured(Table(scaled=scaled))
    assert graph is not None and any(block.unproven for block in graph.blocks) == scaled


class HalfPrecision(nn.Module):
    """A region in half precision, with or without a batch norm, whose shape is told by the size of the batch."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.norm(self.first(x)).relu_().view(x.shape[0], 2, 3).transpose(1, 2)
        return h.reshape(x.shape[0], WIDTH).float()


@pytest.mark.parametrize("norm", [False, True])
def test_a_region_is_judged_inside(norm: bool) -> None:
    graph = captured(HalfPrecision(norm=norm))
    assert graph is not None and graph.how == "export"
    told = [told for block in graph.blocks for told in block.mixes_samples]
    assert bool(told) == norm and all("of test_samples.py: h = self.norm(" in line for line in told)


def _mask_turned_over(h: Tensor) -> Tensor:
    mask = h[:, 0] > 0
    rows, out = h[mask], h.clone()
    mask.logical_not_()
    out[mask] = rows
    return out


def _keys_raised(h: Tensor) -> Tensor:
    """Six keys, told to be below two."""
    keys = h[:, :2].argmax(1)
    keys.add_(4)
    ordered, order = keys.sort()
    return h[order][order.argsort()] * torch.bincount(ordered, minlength=2).cumsum(0)[-1]


def _filled_at_once(h: Tensor) -> Tensor:
    shared = torch.zeros(1, WIDTH).expand(h.shape[0], WIDTH)
    shared.masked_fill_(h > 0.3, 1.0)
    return h + shared


def _put_at_once(h: Tensor) -> Tensor:
    shared = torch.zeros(1, WIDTH).expand(h.shape[0], WIDTH)
    shared.index_put_((torch.arange(h.shape[0]),), h.detach(), accumulate=True)
    return h + shared


@pytest.mark.filterwarnings("ignore:Use of")
@pytest.mark.parametrize("body", [_mask_turned_over, _keys_raised, _filled_at_once, _put_at_once])
def test_what_is_written_is_no_longer_known(body: Body) -> None:
    graph = captured(SampleModel(body))
    assert graph is None or any(block.unproven for block in graph.blocks)


def test_without_weights_nothing_is_measured() -> None:
    with torch.device("meta"):
        model = SampleModel(UNFOLLOWED["threshold of the size"]())
    assert all(block.unproven for block in captured(model).blocks)  # type: ignore[union-attr]


def test_measuring_leaves_the_model_as_it_was() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH)
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return torch.stack([row * 2 for row in torch.dropout(self.norm(self.a(x)), 0.5, self.training)])

    torch.manual_seed(3)
    model = Counts().eval()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    graph = captured(model)
    assert graph is not None and graph.how == "modules"
    (block,) = graph.blocks
    norm, counting = block.mixes_samples
    assert "a buffer that changes with each call (seen)" in counting and norm == "batch_norm"
    assert not model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


# -- compositions


Step = Callable[[Tensor], Tensor]
STEPS: dict[str, Step] = {
    "tanh": torch.tanh,
    "transpose 0 1": lambda h: h.transpose(0, 1),
    "transpose 1 2": lambda h: h.transpose(1, 2),
    "flatten": lambda h: h.reshape(-1, h.shape[-1]).unsqueeze(1),
    "fold": lambda h: h.reshape(h.shape[0] * h.shape[1], -1, 2),
    "unfold": lambda h: h.reshape(-1, WORDS, WIDTH),
    "reshape by size": lambda h: h.contiguous().view(h.shape[1], h.shape[0], -1),
    "roll 0": lambda h: h.roll(1, 0),
    "roll 1": lambda h: h.roll(1, 1),
    "flip 1": lambda h: h.flip(1),
    "sum 1": lambda h: h.sum(1, keepdim=True),
    "mean 0": lambda h: h - h.mean(0, keepdim=True),
    "softmax -1": lambda h: h.softmax(-1),
    "softmax 0": lambda h: h.softmax(0),
    "cumsum 1": lambda h: h.cumsum(1),
    "cat self": lambda h: torch.cat([h, h * 2], 1),
    "cat batch": lambda h: torch.cat([h, h * 2], 0),
    "half": lambda h: h[: h.shape[0] // 2],
    "stack": lambda h: torch.stack([h, -h], 1).flatten(1, 2),
    "chunk": lambda h: h.chunk(2, 0)[0] + h.chunk(2, 0)[-1],
    "repeat": lambda h: h.repeat(2, 1, 1),
    "interleave": lambda h: h.repeat_interleave(2, 0),
    "products": lambda h: h @ h.transpose(-1, -2),
    "cross products": lambda h: torch.einsum("bij,cij->bij", h, h),
    "own products": lambda h: torch.einsum("bij,bkj->bik", h, h),
    "sort 0": lambda h: h.sort(0).values,
    "sort 1": lambda h: h.sort(1).values,
    "sort and undo": lambda h: h[(o := h[:, 0, 0].argsort())][o.argsort()] * 2,
    "sort by another": lambda h: h[h[:, 0, 0].argsort()][h[:, -1, -1].argsort()],
    "place": lambda h: h + torch.arange(h.shape[0], dtype=h.dtype)[:, None, None],
    "word": lambda h: h + torch.arange(h.shape[1], dtype=h.dtype)[None, :, None],
    "size": lambda h: h * torch.ones(h.shape[0]).sum(),
    "first": lambda h: h[:, :1] + h,
    "first sample": lambda h: h[:1] + h,
    "masked": lambda h: torch.where(h > 0, h, torch.zeros_like(h)),
    "mask and back": lambda h: h.index_add(0, (r := (h[:, 0, 0] > 0).nonzero()[:, 0]), h[r]),
    "mask and elsewhere": lambda h: h.index_add(0, (h[:, 0, 0] > 0).nonzero()[:, 0] * 0, h[(h[:, 0, 0] > 0)]),
    "norm": lambda h: nn.functional.layer_norm(h, h.shape[-1:]),
    "norm over samples": lambda h: nn.functional.layer_norm(h.permute(2, 1, 0), h.shape[:1]).permute(2, 1, 0),
    "pad 0": lambda h: nn.functional.pad(h, (0, 0, 0, 0, 1, 0))[:-1],
    "pad 1": lambda h: nn.functional.pad(h, (0, 0, 1, 0))[:, :-1],
}  # fmt: skip


class Composed(nn.Module):
    """Steps one after another on [batch, WORDS, WIDTH]; what they give is taken as a row for each sample."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.first, self.steps = nn.Linear(INPUTS, WORDS * WIDTH), steps

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(-1, WORDS, WIDTH)
        for step in self.steps:
            h = STEPS[step](h)
        return h.reshape(x.shape[0], -1)


@pytest.mark.slow("captures 120 models")
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
def test_no_composition_is_proven_wrongly(steps: list[str]) -> None:
    """Where the rules prove a composition, brute force finds no difference."""
    torch.manual_seed(0)
    model = Composed(steps)
    try:
        for size in (2, 3, 8, 13):
            model(torch.randn(size, INPUTS))
    except (RuntimeError, IndexError):
        return  # makes no sense for every size of batch
    graph = captured(model)
    if graph is not None and not any(block.unproven for block in graph.blocks):
        assert not depends_on_others(model), steps
