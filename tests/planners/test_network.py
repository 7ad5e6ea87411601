"""The network: its attention is PyTorch Geometric's, its scores do not depend on who stands beside whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.planners.learned.decisions import Draft, Drafts, even
from isthmus.planners.learned.features import ACTION, BLOCK, EDGE, SORT, WHOLE, Look, Looked, feedback_of
from isthmus.planners.learned.graph_network import EdgeAttention, GraphNetwork, batch_of
from isthmus.planners.learned.network_numpy import log_likely
from isthmus.planners.learned.prior import load_network, save_network, shipped_prior
from isthmus.planners.learned.tree_search import SearchTree
from tests.plan.small_models import chain
from tests.planners.test_drafts import candidates_of
from tests.planners.test_portfolio import problem, two_regions

SHIPPED = Path(__file__).resolve().parents[2] / "src" / "isthmus" / "planners" / "learned" / "planner.safetensors"


@pytest.mark.parametrize("seed", range(5))
def test_attention_is_that_of_pytorch_geometric(seed: int) -> None:
    geometric = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
    torch.manual_seed(seed)
    sources, targets, edges, width, heads, features = 7, 5, 20, 16, 4, 3
    own = EdgeAttention(width, features, heads)
    theirs = geometric.GATv2Conv(
        (width, width), width // heads, heads, edge_dim=features, add_self_loops=False, bias=False, residual=False
    )
    with torch.no_grad():
        for mine, other in ((own.source, theirs.lin_l), (own.target, theirs.lin_r)):
            other.weight.copy_(mine.weight)
            mine.bias.zero_()  # theirs has one for all or none
        theirs.lin_edge.weight.copy_(own.edge.weight)
        theirs.att.copy_(own.score[None])
    index = torch.stack([torch.randint(sources, (edges,)), torch.randint(targets - 1, (edges,))])  # one gets nothing
    x, y, e = torch.randn(sources, width), torch.randn(targets, width), torch.randn(edges, features)
    with torch.no_grad():
        torch.testing.assert_close(own(x, y, index, e), theirs((x, y), index, e), rtol=1e-5, atol=1e-6)


def looks(seed: int = 0) -> list[Looked]:
    """Some drafts of one problem, on the way to whole ones."""
    task = problem(two_regions(), chain(8), 48)
    drafts, random = Drafts(task), Random(seed)
    candidates = candidates_of(task, calls=10)
    SearchTree(candidates, even).grow()
    assert candidates.best is not None
    look, told, found = Look(task, drafts), feedback_of(task, candidates.best), []
    draft = Draft()
    while actions := drafts.actions(draft):
        found.append(look.at(draft, actions, told))
        draft = draft.having(random.choice(actions))
    return found


def test_features_have_the_sizes_that_are_stated() -> None:
    for one in looks():
        assert one.sorts.shape[1] == SORT and one.whole.shape == (WHOLE,) and one.actions.shape[1] == ACTION
        assert one.scene.blocks.shape[1] == BLOCK and one.links.shape[2] == EDGE["link"]
        every = (one.sorts, one.links, one.place, one.whole, one.actions, one.scene.blocks, one.scene.flow)
        assert all(np.isfinite(values).all() and np.abs(values).max(initial=0) < 50 for values in every)


def test_drafts_side_by_side_are_as_alone() -> None:
    torch.manual_seed(0)
    network, many = GraphNetwork(32, 2).eval(), looks()
    with torch.no_grad():
        together = network(batch_of(many))
        alone = torch.cat([network(batch_of([one])) for one in many])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    counts = [len(one.actions) for one in many]
    assert [float(part.exp().sum()) for part in together.split(counts)] == pytest.approx([1.0] * len(many), rel=1e-5)


def test_without_torch_it_says_the_same() -> None:
    """The forward pass that planning uses against the one that is trained."""
    torch.manual_seed(2)
    network, many = GraphNetwork(32, 2).eval(), looks(seed=3)
    weights = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    with torch.no_grad():
        theirs = network(batch_of(many)).split([len(one.actions) for one in many])
    for degree in {id(one.scene) for one in many}:
        same = [i for i, one in enumerate(many) if id(one.scene) == degree]
        for i, own in zip(same, log_likely(weights, [many[i] for i in same]), strict=True):
            np.testing.assert_allclose(own, theirs[i].numpy(), rtol=1e-3, atol=1e-4)


def test_names_and_order_of_sorts_do_not_matter() -> None:
    """The same scene with its sorts in another order scores the same actions alike."""
    torch.manual_seed(1)
    network = GraphNetwork(32, 2).eval()
    one = next(look for look in looks() if look.current >= 0)
    turn = np.arange(len(one.sorts))[::-1]
    scene = one.scene._replace(sorts=one.scene.sorts[turn])
    turned = one._replace(
        scene=scene,
        sorts=one.sorts[turn],
        links=one.links[turn][:, turn],
        place=one.place[:, turn],
        lanes=one.lanes[:, turn],
        current=int(np.flatnonzero(turn == one.current)[0]),
    )
    with torch.no_grad():
        torch.testing.assert_close(network(batch_of([one])), network(batch_of([turned])), rtol=1e-4, atol=1e-5)


def test_the_shipped_network() -> None:
    """It is small, and in eight calls finds a better plan than an even prior does, over a few problems."""
    assert SHIPPED.stat().st_size < 20e6
    gains = []
    for batch in (24, 48, 96):
        found = []
        for prior in (shipped_prior(), even):
            candidates = candidates_of(problem(two_regions(), chain(8), batch), calls=8)
            SearchTree(candidates, prior).grow()
            found.append(candidates.limit)
        gains.append(np.log(found[1] / found[0]))
    assert np.mean(gains) > 0.0


@pytest.mark.slow("starts processes that import and plan")
def test_features_are_the_same_in_every_process() -> None:
    """Nothing depends on the order of a set of names."""
    code = (
        "from tests.planners.test_network import looks; import hashlib, numpy as np;"
        "print(hashlib.sha256(b''.join(np.ascontiguousarray(x).tobytes() for one in looks() for x in"
        " (one.sorts, one.links, one.place, one.whole, one.actions, one.scene.blocks))).hexdigest())"
    )
    root = Path(__file__).resolve().parents[2]
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_a_network_of_another_cost_model_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "network.safetensors"
    save_network(GraphNetwork(32, 2), file)
    assert load_network(file) is not None
    stamp = {"cost_model": "0", "scene": json.dumps({})}
    save_file(load_file(file), file, metadata=stamp)
    with pytest.warns(UserWarning, match="cost_model 0"):
        assert load_network(file) is None
