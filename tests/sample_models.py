"""Small models that mix samples, depend on a sample's place or on the size of the batch, and models that do not.

Each body takes h of shape [batch, WIDTH], or [batch, WORDS, WIDTH] where its name begins with `words_`, and gives the
same shape. `MIXING` must be refused by every plan that splits the batch; `APART` must be accepted.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["APART", "INPUTS", "MIXING", "UNFOLLOWED", "WIDTH", "WORDS", "Body", "SampleModel"]

WIDTH, WORDS, INPUTS, CLASSES = 6, 4, 5, 3
Body = Callable[[Tensor], Tensor]


class SampleModel(nn.Module):
    """A layer, a body, and a layer."""

    def __init__(self, body: Body, *, words: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.body, self.words = body, words
        if isinstance(body, nn.Module):
            self.add_module("inner", body)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.words:
            h = torch.stack([h * (k + 1) for k in range(WORDS)], dim=1)
        h = self.body(torch.tanh(h))
        return self.last(h.mean(1) if self.words else h)


# -- what mixes samples, or depends on the batch


def _permuted(h: Tensor) -> Tensor:
    index = torch.arange(h.shape[0] - 1, -1, -1)
    return h[index]


def _differences(h: Tensor) -> Tensor:
    return torch.cat([h[:1], h[1:] - h[:-1]])


def _halves_swapped(h: Tensor) -> Tensor:
    half = h.shape[0] // 2
    return torch.cat([h[half:], h[:half]])


def _by_feature(h: Tensor) -> Tensor:
    return h[h[:, 0].argsort()]


def _capacity(h: Tensor) -> Tensor:
    """The first two samples of each expert pass, the others are dropped."""
    chosen = (h[:, 0] > 0).long()
    place = F.one_hot(chosen, 2).cumsum(0).gather(1, chosen[:, None]) - 1
    return h * (place < 2)


def _capacity_by_size(h: Tensor) -> Tensor:
    keep = h[:, 0].topk(h.shape[0] // 2).indices
    return h.index_add(0, keep, h[keep])


def _listed_and_cut(h: Tensor) -> Tensor:
    rows = torch.arange(h.shape[0])[: h.shape[0] // 2]
    return h.index_fill(0, rows, 0.0)


def _pairs(h: Tensor) -> Tensor:
    """Each sample against all others, as in contrastive learning."""
    return (h @ h.t()).softmax(1) @ h


def _siamese(h: Tensor) -> Tensor:
    half = (h.shape[0] + 1) // 2
    return torch.cat([h[:half] * h[-half:], h[half:]])


def _batch_statistics(h: Tensor) -> Tensor:
    return (h - h.mean(0)) / (h.std(0) + 1.0)


def _written(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[1:] = h[:-1]
    return out


def _first_row_added(h: Tensor) -> Tensor:
    h = h.clone()
    h[0] = h[0] * 2
    return h


def _searched(h: Tensor) -> Tensor:
    keys = h[:, 0].contiguous()
    return h + torch.searchsorted(keys.sort().values, keys)[:, None]


def _gather_rows(h: Tensor) -> Tensor:
    index = (torch.arange(h.shape[0]) // 2)[:, None].expand(-1, h.shape[1])
    return h.gather(0, index)


def _scatter_rows(h: Tensor) -> Tensor:
    index = (torch.arange(h.shape[0]) // 2)[:, None].expand(-1, h.shape[1])
    return torch.zeros_like(h).scatter_add(0, index, h)


def _queue(h: Tensor) -> Tensor:
    return h + h.detach().max(0).values


class _Momentum(nn.Module):
    """Keeps a running mean of what it has seen: the next micro-batch sees this one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(h.detach().mean(0) * 0.1)
        return h - self.seen


class _Placed(nn.Module):
    """A bias for each place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.bias[: h.shape[0]]


class _SumsTokens(nn.Module):
    """Attention whose samples are where its words should be (batch_first was forgotten)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, h: Tensor) -> Tensor:
        return self.attention(h, h, h, need_weights=False)[0]


class _Transposed(nn.Module):
    """A layer over the batch: its input is transposed into a fixed number of samples."""

    def forward(self, h: Tensor) -> Tensor:
        return h.t().reshape(-1, WIDTH)


def _sorted_and_expanded(h: Tensor) -> Tensor:
    order = h[:, 0].argsort()
    return h[order][:, None].expand(-1, h.shape[0], -1).sum(1)[order.argsort()]


def _listed_and_expanded(h: Tensor) -> Tensor:
    rows = (h[:, 0] > 0).nonzero()[:, 0]
    return h.index_add(0, rows, h[rows][:, None].expand(-1, h.shape[0], -1).sum(1))


def _listed_by_size(h: Tensor) -> Tensor:
    rows = (h[:, 0] > 0).nonzero()[:, 0]
    return h.index_add(0, rows, h[rows], alpha=h.shape[0])


def _shuffled(h: Tensor) -> Tensor:
    """Samples where channels should be."""
    channels = torch.stack([h, -h], 1).flatten(0, 1).t()[:, :, None, None, None]
    return F.channel_shuffle(channels, 2)[:, :, 0, 0, 0].t().reshape(-1, 2, WIDTH)[:, 0]


def _shared_heads(h: Tensor) -> Tensor:
    """Samples where heads should be, of which several share a key."""
    queries = torch.stack([h, -h], 1).flatten(0, 1)[None, :, None]
    keys = torch.arange(2 * 3 * WIDTH).view(1, 2, 3, WIDTH) / 20
    found = F.scaled_dot_product_attention(queries, keys, keys, enable_gqa=True)
    return found[0, :, 0].reshape(-1, 2, WIDTH).sum(1) + h


def _order_as_truths(h: Tensor) -> Tensor:
    order = h[:, 0].argsort()
    return h[order][order.bool().argsort(stable=True)]


class _Counts(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self, add: Callable[[Tensor], object], *, half: bool = False) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.add, self.half = add, half

    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            self.add(self.calls)
            h = h * 2
        return h / (1 + self.calls)


MIXING: dict[str, Callable[[], Body]] = {
    "order expanded": lambda: _sorted_and_expanded,
    "list expanded": lambda: _listed_and_expanded,
    "list by the size": lambda: _listed_by_size,
    "product by the size": lambda: lambda h: torch.addmm(h, h, torch.eye(WIDTH), alpha=h.shape[0]),
    "words_product by the size": lambda: lambda h: torch.baddbmm(
        h, h, torch.eye(WIDTH).expand(h.shape[0], -1, -1), beta=h.shape[0]
    ),
    "shuffled channels": lambda: _shuffled,
    "shared heads": lambda: _shared_heads,
    "order as truths": lambda: _order_as_truths,
    "counter": lambda: _Counts(lambda calls: calls.add_(1)),
    "counter's element": lambda: _Counts(lambda calls: calls[0].add_(1)),
    "counter's view": lambda: _Counts(lambda calls: calls.view(-1).add_(1)),
    "counter as out": lambda: _Counts(lambda calls: torch.add(calls, 1, out=calls)),
    "counter in a region": lambda: _Counts(lambda calls: calls.add_(1), half=True),
    "roll": lambda: lambda h: torch.roll(h, 1, 0),
    "roll by all": lambda: lambda h: torch.roll(h, 1),
    "flip": lambda: lambda h: h.flip(0),
    "flip both": lambda: lambda h: h.flip((0, 1)),
    "permuted index": lambda: _permuted,
    "differences": lambda: _differences,
    "diff": lambda: lambda h: torch.cat([h[:1], h.diff(dim=0)]),
    "transposing reshape": lambda: lambda h: h.t().reshape(-1, WIDTH),
    "transposing module": _Transposed,
    "halves swapped": lambda: _halves_swapped,
    "einsum over the batch": lambda: lambda h: torch.einsum("bi,ci->ci", h, h),
    "einsum of all pairs": lambda: lambda h: torch.einsum("bi,ci,cj->bj", h, h, h),
    "adds the place": lambda: lambda h: h + 0.1 * torch.arange(h.shape[0])[:, None],
    "adds the place by float": lambda: lambda h: h + torch.arange(0, h.shape[0] * 0.5, 0.5)[:, None],
    "divides by the size": lambda: lambda h: h / h.shape[0],
    "times a tensor of the size": lambda: lambda h: h / torch.full((), h.shape[0]),
    "scaled by a root of the size": lambda: lambda h: h / h.shape[0] ** 0.5,
    "size of a new tensor": lambda: lambda h: h * torch.ones(h.shape[0]).sum(),
    "a table by the size": lambda: lambda h: h * torch.linspace(0, 1, 64)[h.shape[0]],
    "linspace": lambda: lambda h: h + torch.linspace(0, 1, h.shape[0])[:, None],
    "even or odd": lambda: lambda h: h * (h.shape[0] % 2 + 1),
    "eye": lambda: lambda h: torch.eye(h.shape[0]).roll(1, 0) @ h,
    "triangle": lambda: lambda h: torch.ones(h.shape[0], h.shape[0]).tril() @ h / 8,
    "sorted by a feature": lambda: _by_feature,
    "sorted": lambda: lambda h: h.sort(0).values,
    "capacity": lambda: _capacity,
    "capacity by size": lambda: _capacity_by_size,
    "first rows": lambda: _listed_and_cut,
    "all pairs": lambda: _pairs,
    "siamese halves": lambda: _siamese,
    "mean of the batch": lambda: lambda h: h - h.mean(0),
    "mean of everything": lambda: lambda h: h - h.mean(),
    "batch statistics": lambda: _batch_statistics,
    "softmax over the batch": lambda: lambda h: h.softmax(0),
    "log_softmax over the batch": lambda: lambda h: h.log_softmax(0),
    "cumsum": lambda: lambda h: h.cumsum(0),
    "cumprod": lambda: lambda h: h.cumprod(0),
    "cummax": lambda: lambda h: h.cummax(0).values,
    "norm over the batch": lambda: lambda h: F.normalize(h, dim=0),
    "norm of everything": lambda: lambda h: h / h.norm(),
    "max over the batch": lambda: lambda h: h / (1 + h.max(0).values.abs()),
    "running maximum": lambda: _queue,
    "median": lambda: lambda h: h - h.median(0).values,
    "group norm over the batch": lambda: lambda h: F.group_norm(h.t()[None], 1)[0].t(),
    "instance norm over the batch": lambda: lambda h: F.instance_norm(h.t()[None])[0].t(),
    "layer norm over the batch": lambda: lambda h: F.layer_norm(h.t()[None], [WIDTH, h.shape[0]])[0].t(),
    "written by a shift": lambda: _written,
    "first row written": lambda: _first_row_added,
    "first row taken": lambda: lambda h: h + h[0],
    "last row taken": lambda: lambda h: h * h[-1:],
    "select a row": lambda: lambda h: h - h.select(0, 1),
    "every second row": lambda: lambda h: h - h[::2].repeat_interleave(2, 0)[: h.shape[0]],
    "unfold": lambda: lambda h: F.pad(h, (0, 0, 1, 1)).unfold(0, 3, 1).sum(-1),
    "convolution over samples": lambda: lambda h: F.conv1d(h.t()[None], torch.ones(WIDTH, WIDTH, 3), padding=1)[0].t(),
    "pooling over samples": lambda: lambda h: F.avg_pool1d(h.t()[None], 3, 1, 1)[0].t(),
    "padded and cut": lambda: lambda h: F.pad(h, (0, 0, 1, 0))[:-1],
    "gather of rows": lambda: _gather_rows,
    "scatter of rows": lambda: _scatter_rows,
    "index_select": lambda: lambda h: h.index_select(0, torch.arange(h.shape[0]).flip(0)),
    "take_along_dim": lambda: lambda h: h.take_along_dim(h.argsort(0), 0),
    "searchsorted among samples": lambda: _searched,
    "unique": lambda: lambda h: h + (h[:, :1] > 0).float().mean(),
    "rank among samples": lambda: lambda h: h + h[:, :1].argsort(0).argsort(0),
    "distances": lambda: lambda h: torch.cdist(h, h).softmax(1) @ h,
    "covariance": lambda: lambda h: h @ (h.t() @ h) / 8,
    "outer": lambda: lambda h: torch.outer(h[:, 0], h[:, 1]).softmax(1) @ h,
    "tensordot": lambda: lambda h: torch.tensordot(h, torch.tensordot(h, h, ([0], [0])), 1),
    "bias by place": _Placed,
    "running mean": _Momentum,
    "attention over samples": _SumsTokens,
    "gru over samples": lambda: _Recurrent(),
    "words_transposed": lambda: lambda h: h.transpose(0, 1).reshape(h.shape),
    "words_attention over samples": _SumsTokens,
    "words_flattened roll": lambda: lambda h: h.reshape(-1, WIDTH).roll(1, 0).reshape(h.shape),
    "words_flattened sort": lambda: lambda h: h.reshape(-1, WIDTH).sort(0).values.reshape(h.shape),
    "words_of another sample": lambda: lambda h: torch.stack([h[:, 0], h[:, 1].roll(1, 0), h[:, 2], h[:, 3]], 1),
    "words_swapaxes": lambda: lambda h: h.swapaxes(0, 1).contiguous().view(h.shape),
    "words_first words taken": lambda: lambda h: h + h.flatten(0, 1)[:WORDS],
    "dropped whole": lambda: lambda h: h * torch.sigmoid(h[:, 0].sum()),
    "by a count": lambda: lambda h: torch.where((h[:, 0].abs() > 0.01).sum() > 5, h, 2 * h),
    "counted": lambda: lambda h: h * (h > 0).sum() / 10,
    "nonzero counted": lambda: lambda h: h * ((h[:, 0] > 0).nonzero().shape[0] + 1),
    "masked mean": lambda: lambda h: h - h[h[:, 0] > 0].mean(0),
    "histogram": lambda: lambda h: h * torch.bincount((h[:, 0] > 0).long(), minlength=2)[0],
    "detached mean": lambda: lambda h: h - h.detach().mean(0),
    "bmm of one sample": lambda: lambda h: torch.bmm(h[None], h.t()[None])[0] @ h,
    "index_copy": lambda: lambda h: h.index_copy(0, torch.tensor([0]), h[1:2]),
    "where by place": lambda: lambda h: torch.where(torch.arange(h.shape[0])[:, None] % 2 == 0, h, -h),
    "expand of one": lambda: lambda h: h[:1].expand(h.shape[0], -1) + h,
    "vmap over features": lambda: lambda h: torch.vmap(lambda column: column - column.mean(), 1, 1)(h),
}  # fmt: skip


class _Recurrent(nn.Module):
    """A recurrent layer that goes from sample to sample (an unbatched input)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.cell(h)[0]


# -- what export cannot follow, and mixes


def _by_value(h: Tensor) -> Tensor:
    return h * 2 if int((h[:, 0].abs() > 0.01).sum()) > 5 else h * 0.5


def _looped(h: Tensor) -> Tensor:
    rows, before = [], torch.zeros(WIDTH)
    for row in h:
        before = row + 0.5 * before
        rows.append(before)
    return torch.stack(rows)


def _by_plain_size(h: Tensor) -> Tensor:
    return h / int(h.shape[0])


def _by_threshold(h: Tensor) -> Tensor:
    return h * 2 if h.shape[0] > 4 else h


def _through_numpy(h: Tensor) -> Tensor:
    return h + torch.from_numpy(h.detach().numpy().mean(0))


def _through_lists(h: Tensor) -> Tensor:
    return h + torch.tensor(max(h[:, 0].tolist()))


class _Keeps(nn.Module):
    """Keeps something in Python from call to call."""

    def __init__(self, step: Callable[[_Keeps, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(1))
        self.calls, self.seen, self.step = 0, [torch.zeros(WIDTH)], step

    def forward(self, h: Tensor) -> Tensor:
        return self.step(self, h)


def _buffer_replaced(kept: _Keeps, h: Tensor) -> Tensor:
    kept.buffer = kept.buffer + 1
    return h / (1 + kept.buffer)


def _number_replaced(kept: _Keeps, h: Tensor) -> Tensor:
    kept.calls += 1
    return h / (1 + kept.calls)


def _list_extended(kept: _Keeps, h: Tensor) -> Tensor:
    kept.seen.append(h.detach().mean(0))
    return h + kept.seen[-2]


UNFOLLOWED: dict[str, Callable[[], Body]] = {
    "buffer replaced": lambda: _Keeps(_buffer_replaced),
    "number replaced": lambda: _Keeps(_number_replaced),
    "list extended": lambda: _Keeps(_list_extended),
    "Python's random numbers": lambda: lambda h: h * random.random(),
    "branch on a count": lambda: _by_value,
    "from row to row": lambda: _looped,
    "plain size": lambda: _by_plain_size,
    "threshold of the size": lambda: _by_threshold,
    "through numpy": lambda: _through_numpy,
    "through lists": lambda: _through_lists,
}


# -- what keeps samples apart


class _Experts(nn.Module):
    """Two experts with a mask each, as people write them: no sample is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        score, chosen = self.gate(h).softmax(1).max(1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out = out.index_add(0, rows, expert(h[rows]) * score[rows, None])
        return out


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.attention(h, h, h, need_weights=False)[0]


class _Queries(nn.Module):
    """Attention of learned queries, samples in dimension 1, and its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.attention = nn.Embedding(3, WIDTH), nn.MultiheadAttention(WIDTH, 2)

    def forward(self, h: Tensor) -> Tensor:
        memory = h.transpose(0, 1)
        queries = self.queries.weight.unsqueeze(1).repeat(1, h.shape[0], 1)
        return self.attention(queries, memory, memory)[0].mean(0)[:, None] + h


class _Looks(nn.Module):
    """Attention with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        found, weights = self.attention(h, h, h)
        return found + weights @ h


class _Masked(nn.Module):
    """A transformer's layer with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.layers(h, mask=nn.Transformer.generate_square_subsequent_mask(WORDS))


class _Cells(nn.Module):
    """Recurrent layers step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        state, memory = self.one(h)
        state, memory = self.one(h * 2, (state, memory))
        return self.other(state + memory, h)


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h, h.tanh())


class _Read(nn.Module):
    """Reads a frozen table through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 2 * WIDTH).view(2, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return (h * self.table[0]).relu_() + self.table.view(-1)[:WIDTH]


APART: dict[str, Callable[[], Body]] = {
    "words_queries": _Queries,
    "words_attention and its weights": _Looks,
    "words_masked attention": _Masked,
    "cells": _Cells,
    "bilinear": _Bilinear,
    "table read through views": _Read,
    "complex numbers": lambda: lambda h: torch.view_as_real(
        torch.view_as_complex(h.reshape(-1, 3, 2)) * torch.ones(3) * 1j
    ).flatten(1),
    "pairwise distance": lambda: lambda h: h + F.pairwise_distance(h, h.roll(1, 1), keepdim=True),
    "norms of rows": lambda: lambda h: h / (1 + torch.linalg.norm(h, dim=1, keepdim=True)),
    "words_einsum with dots": lambda: lambda h: torch.einsum("...i,ij->...j", h, torch.eye(WIDTH) + 0.1),
    "words_fft2": lambda: lambda h: torch.fft.fft2(h, dim=(-1, -2)).real * 0.1,
    "written list": lambda: lambda h: h.index_add(0, (r := (h[:, 0] > 0).nonzero()[:, 0]), h[r].mul_(2)),
    "layers": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, WIDTH)),
    "experts": _Experts,
    "softmax of features": lambda: lambda h: h.softmax(1),
    "roll of features": lambda: lambda h: h.roll(1, 1),
    "sorted features": lambda: lambda h: h.sort(1).values,
    "permuted features": lambda: lambda h: h[:, torch.tensor([5, 4, 3, 2, 1, 0])],
    "there and back": lambda: lambda h: h.t().contiguous().t() * 2,
    "views": lambda: lambda h: h.view(-1, 2, 3).transpose(1, 2).reshape(-1, WIDTH),
    "own products": lambda: lambda h: torch.einsum("bi,bj->bij", h, h).sum(1),
    "mean of features": lambda: lambda h: h - h.mean(1, keepdim=True),
    "chunks of features": lambda: lambda h: torch.cat(h.chunk(2, 1)[::-1], 1),
    "clamped": lambda: lambda h: torch.where(h > 0, h, 0.1 * h).clamp(-1, 1),
    "ones of the batch": lambda: lambda h: h + torch.ones(h.shape[0], 1),
    "words_attention": _Attends,
    "words_flattened": lambda: lambda h: torch.tanh(h.reshape(-1, WIDTH) * 2).reshape(h.shape),
    "words_cumsum": lambda: lambda h: h.cumsum(1),
    "words_places": lambda: lambda h: h + 0.1 * torch.arange(h.shape[1])[None, :, None],
    "words_first": lambda: lambda h: h + h[:, :1],
    "words_roll": lambda: lambda h: h.roll(1, 1),
}  # fmt: skip
