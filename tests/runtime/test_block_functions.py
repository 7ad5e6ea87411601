"""Blocks as functions of keys, tensors and inputs: against the blocks themselves, run while their draws are watched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from isthmus.model.runnable_blocks import cut
from isthmus.model.torch_export import Example
from isthmus.model.zoo.gpt import GPT
from isthmus.runtime.block_calls import BlockCalls
from isthmus.runtime.block_functions import BlockFunction, Link, function_of
from isthmus.runtime.random.draws import Draw, draws_of
from isthmus.runtime.random.randomness import Randomness

from ..model import models

CPU = torch.device("cpu")


def block_function(module: nn.Module, draws: Sequence[Draw]) -> BlockFunction | None:
    assert isinstance(module, fx.GraphModule)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    results = module.graph.output_node().args[0]
    return function_of([Link(module, draws, tuple(names), tuple(f"result {i}" for i in range(len(results))))])


class Attends(nn.Module):
    """Attention in every form, a dropout of another dimension than the first, and a batch norm that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(8, 24), nn.BatchNorm1d(6)
        self.bias = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like x, [samples, 6, 8]."""
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(self.norm(x)).chunk(3, -1))
        causal = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        biased = F.scaled_dot_product_attention(q, k, v, self.bias, 0.2, scale=0.7)
        masked = F.scaled_dot_product_attention(q, k, v, torch.ones(6, 6).tril(1).bool(), 0.2)
        y = F.dropout((causal + biased + masked).transpose(0, 1), 0.4).transpose(0, 1)
        return x + y.transpose(1, 2).flatten(2)


def gpt() -> tuple[nn.Module, Tensor]:
    return GPT(layers=2, width=16, heads=4, longest=8, vocabulary=50, dropout=0.25), models.ids(6, length=8)


def attends() -> tuple[nn.Module, Tensor]:
    return Attends(), torch.randn(6, 6, 8)


@pytest.mark.parametrize("build", [gpt, attends])
def test_the_same_as_the_watched_block(build: object) -> None:
    torch.manual_seed(0)
    module, x = build()  # type: ignore[operator]
    example = Example(args=(x[:2],))
    pieces = cut(
        module.double().train(), example if x.dtype == torch.int64 else Example(args=(x[:2].double(),)), name="m"
    )
    x = x if x.dtype == torch.int64 else x.double()
    draws = draws_of(pieces, Example(args=(x[:2],)))
    randomness = Randomness(3, pieces.graph, draws)
    calls = BlockCalls(randomness, pieces, CPU)
    known, places = pieces.bind((x,), {}), range(40, 46)
    for index, block in enumerate(pieces.blocks):
        assert block_function(block, draws[index]) is not None
        results: list[Sequence[Tensor]] = []
        for watched in (True, False):
            inputs = [
                t.detach().requires_grad_(t.is_floating_point()) for t in (known[n] for n in pieces.incoming[index])
            ]
            if watched:
                with randomness.at(7, index, places):
                    given = block(*inputs)
            else:
                given = calls.of(7, index, block, places)(*inputs)
            wanted = [t for t in (*inputs, *block.parameters()) if t.requires_grad]
            gradients = torch.autograd.grad(
                [g.square().sum() for g in given if g.requires_grad], wanted, allow_unused=True
            )
            results.append([*given, *(g for g in gradients if g is not None)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        known |= zip(pieces.outgoing[index], results[0], strict=False)


def test_equal_blocks_have_equal_code() -> None:
    module, x = gpt()
    example = Example(args=(x[:2],))
    pieces = cut(module, example, name="m")
    made = [block_function(b, d) for b, d in zip(pieces.blocks, draws_of(pieces, example), strict=True)]
    texts: dict[str, set[str]] = {}
    for block, function in zip(pieces.graph.blocks, made, strict=True):
        assert function is not None
        texts.setdefault(block.digest, set()).add(function.text)
    assert len(texts) < len(made) and all(len(found) == 1 for found in texts.values())


def test_other_random_operations_are_left_to_the_watch() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    example = Example(args=(torch.randn(2, 3),))
    pieces = cut(Noisy(), example, name="m")
    assert block_function(pieces.blocks[0], draws_of(pieces, example)[0]) is None
