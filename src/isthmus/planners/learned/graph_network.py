"""The network of `learned`: attention over the graph of a scene, and a score for each action that a draft may take.

For each kind of edge, a layer lets every node attend to those that edges of that kind lead from (GATv2: Brody et al.
2022). For an edge j -> i with features e,

    z = leaky(L h_j + R h_i + E e)        a_ij = softmax over j of (v . z)        m_i = sum_j a_ij L h_j

in several heads. Messages of all kinds are added, go through a small network and are added to the node. An action's
score depends on its own features, the sort whose role it chooses, the lane that it joins, and the mean of all nodes:
so the same weights serve any number of blocks, sorts and actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.planners.learned.features import ACTION, BLOCK, EDGE, SORT, WHOLE, Looked

__all__ = ["Batch", "EdgeAttention", "GraphNetwork", "batch_of"]

_HEADS = 4
_SLOPE = 0.2
_SORTS, _BLOCKS = "sorts", "blocks"
_ENDS = {  # of each kind of edge: where it leads from and to
    "next": (_BLOCKS, _BLOCKS),
    "before": (_BLOCKS, _BLOCKS),
    "link": (_SORTS, _SORTS),
    "place": (_BLOCKS, _SORTS),
    "serve": (_SORTS, _BLOCKS),
}


class Batch(NamedTuple):
    """Several drafts as one graph."""

    nodes: dict[str, Tensor]  # features of blocks and sorts
    drafts: dict[str, Tensor]  # the draft that each of them is of
    edges: dict[str, tuple[Tensor, Tensor]]  # [2, edges] from and to, and features
    whole: Tensor  # [drafts, WHOLE]
    actions: Tensor  # [actions, ACTION]
    of: Tensor  # the draft of each action
    current: Tensor  # the sort of each action, -1 where it is about none
    lanes: Tensor  # [2, n] actions and the sorts of lanes that they join

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        return Batch(
            {name: x.to(device) for name, x in self.nodes.items()},
            {name: x.to(device) for name, x in self.drafts.items()},
            {name: (index.to(device), x.to(device)) for name, (index, x) in self.edges.items()},
            *(x.to(device) for x in self[3:]),
        )


def batch_of(looked: Sequence[Looked]) -> Batch:
    """Put drafts, of the same problem or of different ones, side by side."""
    blocks, sorts = [len(one.scene.blocks) for one in looked], [len(one.sorts) for one in looked]
    first_block, first_sort = np.cumsum([0, *blocks]), np.cumsum([0, *sorts])
    index: dict[str, list[np.ndarray]] = {name: [] for name in EDGE}
    features: dict[str, list[np.ndarray]] = {name: [] for name in EDGE}
    for one, b, s, at_b, at_s in zip(looked, blocks, sorts, first_block, first_sort, strict=False):
        chain = np.arange(b - 1) + at_b
        others = np.nonzero(~np.eye(s, dtype=bool))
        pairs = np.indices((b, s)).reshape(2, -1)
        place = np.stack([pairs[0] + at_b, pairs[1] + at_s])
        for name, found, values in (
            ("next", np.stack([chain, chain + 1]), one.scene.flow),
            ("before", np.stack([chain + 1, chain]), one.scene.flow),
            ("link", np.stack(others) + at_s, one.links[others]),
            ("place", place, one.place.reshape(b * s, -1)),
            ("serve", place[::-1], one.place.reshape(b * s, -1)),
        ):
            index[name].append(found)
            features[name].append(values)
    counts = [len(one.actions) for one in looked]
    first_action = np.cumsum([0, *counts])
    current = [
        np.full(n, one.current + at if one.current >= 0 else -1)
        for one, n, at in zip(looked, counts, first_sort, strict=False)
    ]
    joined = [
        np.add(np.nonzero(one.lanes), [[at], [s]]) for one, at, s in zip(looked, first_action, first_sort, strict=False)
    ]
    return Batch(
        {
            _BLOCKS: _floats([one.scene.blocks for one in looked]),
            _SORTS: _floats([one.sorts for one in looked]),
        },
        {_BLOCKS: _repeated(blocks), _SORTS: _repeated(sorts)},
        {name: (_whole(np.concatenate(index[name], axis=1)), _floats(features[name])) for name in EDGE},
        torch.from_numpy(np.stack([one.whole for one in looked])),
        _floats([one.actions for one in looked]),
        _repeated(counts),
        _whole(np.concatenate(current)),
        _whole(np.concatenate(joined, axis=1)),
    )


def _floats(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


def _whole(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _repeated(counts: Sequence[int]) -> Tensor:
    return _whole(np.repeat(np.arange(len(counts)), counts))


class EdgeAttention(nn.Module):
    """One kind of edge in one layer."""

    def __init__(self, width: int, features: int, heads: int = _HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.source, self.target = nn.Linear(width, width), nn.Linear(width, width)
        self.edge = nn.Linear(features, width, bias=False)
        self.score = nn.Parameter(torch.randn(heads, width // heads) / (width // heads) ** 0.5)

    def forward(self, source: Tensor, target: Tensor, index: Tensor, edges: Tensor) -> Tensor:
        """Return the messages to all targets; nothing where no edge leads."""
        shape = (-1, self.heads, source.shape[-1] // self.heads)
        there, here = index
        sent = self.source(source).view(shape)[there]
        z = nn.functional.leaky_relu(
            sent + self.target(target).view(shape)[here] + self.edge(edges).view(shape), _SLOPE
        )
        found = (z * self.score).sum(-1)  # [edges, heads]
        most = found.new_full((len(target), self.heads), -torch.inf)
        most = most.scatter_reduce(0, here[:, None].expand_as(found), found.detach(), "amax")
        weight = (found - most[here]).exp()
        total = weight.new_zeros(len(target), self.heads).index_add_(0, here, weight)
        part = weight / total[here]
        out = sent.new_zeros(len(target), *sent.shape[1:]).index_add_(0, here, part[:, :, None] * sent)
        messages: Tensor = out.flatten(1)
        return messages


class _Layer(nn.Module):
    """All kinds of edges, once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict({name: EdgeAttention(width, features) for name, features in EDGE.items()})
        self.norms = nn.ModuleDict({name: nn.LayerNorm(width) for name in (_BLOCKS, _SORTS)})
        self.after = nn.ModuleDict({name: _two(2 * width, width, width) for name in (_BLOCKS, _SORTS)})

    def forward(self, nodes: dict[str, Tensor], edges: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Return the features of the nodes after this layer."""
        known = {name: self.norms[name](x) for name, x in nodes.items()}
        messages = {name: torch.zeros_like(x) for name, x in nodes.items()}
        for name, attention in self.kinds.items():
            source, target = _ENDS[name]
            messages[target] = messages[target] + attention(known[source], known[target], *edges[name])
        return {name: x + self.after[name](torch.cat([known[name], messages[name]], 1)) for name, x in nodes.items()}


def _two(inputs: int, inner: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, inner), nn.GELU(), nn.Linear(inner, outputs))


class GraphNetwork(nn.Module):
    """Scores of actions."""

    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.width = width
        self.first = nn.ModuleDict({_BLOCKS: nn.Linear(BLOCK, width), _SORTS: nn.Linear(SORT, width)})
        self.whole = _two(WHOLE, width, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))
        self.action = _two(ACTION, width, width)
        self.decide = nn.Sequential(
            nn.LayerNorm(6 * width), nn.Linear(6 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, 1)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the logarithm of how likely each action is the best of its draft, [actions]."""
        whole = self.whole(batch.whole)
        nodes = {name: self.first[name](x) + whole[batch.drafts[name]] for name, x in batch.nodes.items()}
        for layer in self.layers:
            nodes = layer(nodes, batch.edges)
        means = [_means(nodes[name], batch.drafts[name], len(whole)) for name in (_BLOCKS, _SORTS)]
        sorts = nodes[_SORTS]
        current = torch.where(batch.current[:, None] >= 0, sorts[batch.current.clamp(min=0)], 0.0)
        lane = _means(sorts[batch.lanes[1]], batch.lanes[0], len(batch.actions))
        parts = [self.action(batch.actions), current, lane, whole[batch.of], *(mean[batch.of] for mean in means)]
        scores = self.decide(torch.cat(parts, 1))[:, 0]
        return _log_softmax(scores, batch.of, len(whole))


def _means(x: Tensor, at: Tensor, count: int) -> Tensor:
    """Return the mean of the rows that belong to each of `count` groups; 0 where there is none."""
    total = x.new_zeros(count, x.shape[1]).index_add_(0, at, x)
    rows = x.new_zeros(count).index_add_(0, at, torch.ones_like(at, dtype=x.dtype))
    return total / rows.clamp(min=1.0)[:, None]


def _log_softmax(scores: Tensor, at: Tensor, count: int) -> Tensor:
    most = scores.new_full((count,), -torch.inf).scatter_reduce(0, at, scores.detach(), "amax")
    moved = scores - most[at]
    total = scores.new_zeros(count).index_add_(0, at, moved.exp())
    return moved - total.log()[at]
