"""The network of `learned` without torch, which takes longer to import than to plan with: the same maths in numpy.

`graph_network` is what is trained; a test holds this to it. All edges of a scene are there (every sort sees every
other, every group every sort), so that attention is dense: arrays have the axes [drafts, from, to, heads, width].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import erf

from isthmus.planners.learned.features import Looked

__all__ = ["Weights", "log_likely"]

Array = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Weights = Mapping[str, Array]  # by the names of Network's state
_SLOPE = 0.2


def log_likely(weights: Weights, looked: Sequence[Looked]) -> list[Array]:
    """Return for each draft the logarithm of how likely each of its actions is the best one. All are of one scene."""
    sorts, links = np.stack([one.sorts for one in looked]), np.stack([one.links for one in looked])
    place, whole = np.stack([one.place for one in looked]), np.stack([one.whole for one in looked])
    scene, count = looked[0].scene, len(looked)
    groups = len(scene.blocks)
    around = _two(weights, "whole", whole)
    blocks = _linear(weights, "first.blocks", scene.blocks)[None] + around[:, None]
    nodes = {"blocks": blocks, "sorts": _linear(weights, "first.sorts", sorts) + around[:, None]}
    chain = np.zeros((1, groups, groups, 1), np.float32)
    chain[0, np.arange(groups - 1), np.arange(1, groups)] = scene.flow
    follows = np.eye(groups, k=1, dtype=bool)
    edges: dict[str, tuple[str, str, Array, Bools]] = {
        "next": ("blocks", "blocks", chain, follows),
        "before": ("blocks", "blocks", chain.transpose(0, 2, 1, 3), follows.T),
        "link": ("sorts", "sorts", links, ~np.eye(sorts.shape[1], dtype=bool)),
        "place": ("blocks", "sorts", place, np.ones(place.shape[1:3], bool)),
        "serve": ("sorts", "blocks", place.transpose(0, 2, 1, 3), np.ones(place.shape[2:0:-1], bool)),
    }
    layer = 0
    while f"layers.{layer}.norms.sorts.weight" in weights:
        at = f"layers.{layer}"
        known = {name: _norm(weights, f"{at}.norms.{name}", x) for name, x in nodes.items()}
        messages = {name: np.zeros_like(x) for name, x in nodes.items()}
        for name, (source, target, features, mask) in edges.items():
            messages[target] = messages[target] + _attend(
                weights, f"{at}.kinds.{name}", known[source], known[target], features, mask
            )
        for name, x in nodes.items():
            both = np.concatenate([known[name], messages[name]], -1)
            nodes[name] = x + _two(weights, f"{at}.after.{name}", both)
        layer += 1
    means = [nodes[name].mean(1) for name in ("blocks", "sorts")]
    return [
        _scores(weights, looked[i], nodes["sorts"][i], np.concatenate([around[i], *(mean[i] for mean in means)]))
        for i in range(count)
    ]


def _scores(weights: Weights, one: Looked, sorts: Array, shared: Array) -> Array:
    """Return the log-probabilities of the actions of one draft."""
    actions, width = len(one.actions), sorts.shape[1]
    current = sorts[one.current] if one.current >= 0 else np.zeros(width, np.float32)
    joined = one.lanes.astype(np.float32)
    lane = joined @ sorts / np.maximum(joined.sum(1, keepdims=True), 1.0)
    own = _two(weights, "action", one.actions)
    every = np.concatenate([own, np.tile(current, (actions, 1)), lane, np.tile(shared, (actions, 1))], 1)
    inner = _gelu(_linear(weights, "decide.1", _norm(weights, "decide.0", every)))
    scores = _linear(weights, "decide.3", inner)[:, 0]
    moved = scores - scores.max()
    likely: Array = moved - np.log(np.exp(moved).sum())
    return likely


def _attend(
    weights: Weights, at: str, source: Array, target: Array, edges: Array, mask: npt.NDArray[np.bool_]
) -> Array:
    heads, part = weights[f"{at}.score"].shape
    sent = _linear(weights, f"{at}.source", source).reshape(*source.shape[:2], heads, part)
    here = _linear(weights, f"{at}.target", target)
    z = _times(edges, weights[f"{at}.edge.weight"].T) + sent.reshape(
        *sent.shape[:2], 1, -1
    )  # [drafts, from, to, width]
    z += here[:, None]
    np.maximum(z, _SLOPE * z, out=z)
    found = _times(z, _apart(weights[f"{at}.score"]))
    found[:, ~mask] = -np.inf
    found -= np.maximum(found.max(1, keepdims=True), -1e30)
    parts = np.exp(found, out=found)
    parts /= np.maximum(parts.sum(1, keepdims=True), 1e-30)
    messages: Array = parts.transpose(0, 3, 2, 1) @ sent.transpose(0, 2, 1, 3)  # [drafts, heads, to, part]
    return messages.transpose(0, 2, 1, 3).reshape(*target.shape)


def _apart(score: Array) -> Array:
    """Return a matrix, [width, heads], in which each head has its own part of the width, and nothing of the others'."""
    heads, part = score.shape
    matrix = np.zeros((heads, part, heads), np.float32)
    matrix[np.arange(heads), :, np.arange(heads)] = score
    return matrix.reshape(heads * part, heads)


def _linear(weights: Weights, at: str, x: Array) -> Array:
    return _times(x, weights[f"{at}.weight"].T) + weights[f"{at}.bias"]


def _times(x: Array, matrix: Array) -> Array:
    """Multiply in one go: numpy multiplies arrays of more than two axes matrix by matrix."""
    return (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], -1)


def _two(weights: Weights, at: str, x: Array) -> Array:
    return _linear(weights, f"{at}.2", _gelu(_linear(weights, f"{at}.0", x)))


def _gelu(x: Array) -> Array:
    out: Array = (0.5 * x * (1.0 + erf(x / np.sqrt(np.float32(2.0))))).astype(np.float32)
    return out


def _norm(weights: Weights, at: str, x: Array) -> Array:
    middle = x - x.mean(-1, keepdims=True)
    out: Array = middle / np.sqrt((middle**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{at}.weight"]
    return out + weights[f"{at}.bias"]
