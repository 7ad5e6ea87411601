"""The prior of a trained network: `learned` is `search` that knows what was good elsewhere."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from isthmus.cost.version import COST_MODEL
from isthmus.planners.budget import Search
from isthmus.planners.learned.decisions import Asked, Drafts, Prior, even
from isthmus.planners.learned.features import ACTION, BLOCK, EDGE, SCENE, SORT, WHOLE, Feedback, Look, feedback_of
from isthmus.planners.learned.network_numpy import Weights, log_likely
from isthmus.planners.problem import Candidate, Floats
from isthmus.planners.search_constants import DRAFT_EFFORT, EVEN_PART, NETWORK_EFFORT

if TYPE_CHECKING:
    from isthmus.planners.learned.graph_network import GraphNetwork

__all__ = ["NetworkPrior", "load_network", "save_network", "shipped_prior"]

_FILE = "planner.safetensors"


def shipped_prior() -> Prior:
    """Return the prior of the network in the package.

    An even one, with a warning, where it is of another cost model.
    """
    weights = _shipped()
    return NetworkPrior(weights) if weights is not None else even


@cache
def _shipped() -> Weights | None:
    file = resources.files("isthmus.planners.learned") / _FILE
    if not file.is_file():
        warnings.warn("the package holds no network for the planner learned: it searches without one", stacklevel=3)
        return None
    with resources.as_file(file) as path:
        return load_network(path)


def _stamp() -> dict[str, str]:
    """Return the versions and sizes that must agree for a network to be of use."""
    sizes = {"block": BLOCK, "sort": SORT, "whole": WHOLE, "action": ACTION, **EDGE}
    return {"cost_model": str(COST_MODEL), "scene": str(SCENE), "features": json.dumps(sizes)}


def save_network(network: GraphNetwork, file: Path) -> None:
    """Write the weights and what they were trained for."""
    tensors = {name: tensor.detach().cpu().numpy() for name, tensor in network.state_dict().items()}
    part = file.with_suffix(".part")
    save_file(tensors, part, metadata=_stamp())
    part.replace(file)


def load_network(file: Path) -> Weights | None:
    """Read the weights of a file; None, with a warning, where they were trained for another cost model or other
    features.
    """
    with safe_open(file, framework="numpy") as opened:
        stamp = opened.metadata() or {}
        other = [name for name, text in _stamp().items() if stamp.get(name) != text]
        if other:
            found = ", ".join(f"{name} {stamp.get(name)} (here {_stamp()[name]})" for name in other)
            warnings.warn(f"{file.name} was trained for {found}: searching without it", stacklevel=2)
            return None
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


class NetworkPrior:
    """Asks a network; remembers what it has looked at of the problem at hand."""

    def __init__(self, weights: Weights, blind: str = "") -> None:
        self.weights, self.blind = weights, blind
        self._look: Look | None = None
        self._told: tuple[Candidate | None, Feedback | None] = (None, None)

    def __call__(self, search: Search, drafts: Drafts, asked: Sequence[Asked]) -> list[Floats]:
        """Return for each draft how likely each of its actions is the best one."""
        if self._look is None or self._look.drafts is not drafts:
            self._look = Look(search.problem, drafts, self.blind)
        if search.best is not self._told[0]:
            best = search.best
            self._told = best, None if best is None else feedback_of(search.problem, best)
        search.state.effort += NETWORK_EFFORT + DRAFT_EFFORT * len(asked)
        looked = [self._look.at(draft, actions, self._told[1]) for draft, actions in asked]
        likely: dict[int, Floats] = {}
        for scene in {id(one.scene) for one in looked}:
            same = [i for i, one in enumerate(looked) if id(one.scene) == scene]
            found = log_likely(self.weights, [looked[i] for i in same])
            likely |= {i: np.exp(part.astype(np.float64)) for i, part in zip(same, found, strict=True)}
        return [(1 - EVEN_PART) * likely[i] / likely[i].sum() + EVEN_PART / len(likely[i]) for i in range(len(looked))]
