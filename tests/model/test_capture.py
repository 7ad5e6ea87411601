"""Block graphs of small models: names, repetition, tensors, ties, linear weights, what tensor parallelism can split."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from torch import Tensor, nn

from isthmus.errors import ModelError, UsageError
from isthmus.model.capture import Example, capture
from isthmus.model.digest import digest_of
from isthmus.model.graph import BlockGraph, Linear

from . import models


def meta(build: type[nn.Module], *args: object) -> nn.Module:
    with torch.device("meta"):
        return build(*args)


@pytest.fixture(scope="module")
def gpt() -> BlockGraph:
    return capture(meta(models.Gpt, 24), Example(args=(models.ids(2),)), name="gpt", sequence=16)


def test_a_repetitive_model_has_few_distinct_blocks(gpt: BlockGraph) -> None:
    assert len(gpt.blocks) == 2 * 24 + 2
    assert len({block.digest for block in gpt.blocks}) <= 5
    assert [b.name for b in gpt.blocks[:3]] == ["wte", "h.0.attn", "h.0.mlp"] and gpt.blocks[-1].name == "head"
    assert len(gpt.by_name) == len(gpt.blocks)


def test_one_tensor_of_the_hidden_width_crosses_each_cut(gpt: BlockGraph) -> None:
    between = [tensor for tensor in gpt.tensors if tensor.source >= 0]
    assert [(t.source, t.targets) for t in between] == [(i, (i + 1,)) for i in range(len(gpt.blocks) - 1)]
    assert all((t.elements, t.fixed, t.width, t.split, t.grad) == (16 * 32, 0, None, "concat", True) for t in between)
    (ids,) = [tensor for tensor in gpt.tensors if tensor.source < 0]
    assert (ids.name, ids.elements, ids.width, ids.grad) == ("ids", 16, 8, False)


def test_under_a_limit_layers_merge_alike() -> None:
    graph = capture(meta(models.Gpt, 8), Example(args=(models.ids(2),)), name="gpt", max_blocks=12)
    assert 6 <= len(graph.blocks) <= 12
    assert len({block.digest for block in graph.blocks}) <= 5


def test_parameters_are_the_models(gpt: BlockGraph) -> None:
    model = meta(models.Gpt, 24)
    assert gpt.elements == sum(p.numel() for p in model.parameters())
    assert {p.name for p in gpt.parameters} == {name for name, _ in model.named_parameters()}
    assert {name for block in gpt.blocks for name in block.parameters} == set(gpt.parameter)
    assert gpt.parameter["wte.weight"].ties == ("head.weight",) and gpt.parameter["wte.weight"].linear is None
    assert gpt.parameter["h.3.mlp.up.weight"].linear == Linear(rows=16, inputs=32, outputs=128)
    assert gpt.parameter["wpe.weight"].linear is None


def test_attention_and_mlp_can_be_split(gpt: BlockGraph) -> None:
    attention, mlp = gpt.blocks[1], gpt.blocks[2]
    assert attention.tensor is not None and mlp.tensor is not None
    assert attention.tensor.parameters == ("h.0.attn.qkv.weight", "h.0.attn.qkv.bias", "h.0.attn.proj.weight")
    assert (attention.tensor.heads, attention.tensor.reduces, attention.tensor.elements) == (4, 1, 16 * 32)
    assert attention.tensor.flops == attention.forward_flops
    assert mlp.tensor.parameters == ("h.0.mlp.up.weight", "h.0.mlp.up.bias", "h.0.mlp.down.weight")
    assert (mlp.tensor.heads, mlp.tensor.saved) == (128, 2 * 16 * 128)  # its width; before and after the activation
    assert gpt.blocks[0].tensor is None and gpt.blocks[-1].tensor is None


def test_gated_layers_are_one_pair_and_are_never_cut() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    (block,) = capture(Gated(), Example(args=(torch.zeros(2, 8),)), name="gated").blocks
    assert block.tensor is not None
    assert {name.split(".")[0] for name in block.tensor.parameters} == {"gate", "up", "down"}


def test_a_value_read_elsewhere_makes_no_pair() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.a(x))
            return self.b(y) + y

    graph = capture(Leaky(), Example(args=(torch.zeros(2, 8),)), name="leaky")
    assert all(block.tensor is None for block in graph.blocks)


def test_memory_of_the_encoder_goes_to_every_decoder_layer() -> None:
    graph = capture(meta(models.Decoder), Example(args=(models.ids(2), models.ids(2, length=12))), name="both")
    shared = [tensor for tensor in graph.tensors if tensor.source >= 0 and len(tensor.targets) > 1]
    assert any(len(tensor.targets) >= 2 and tensor.elements == 16 * 32 for tensor in shared)
    assert not any(tensor.split == "whole" for tensor in graph.tensors)  # the mask is computed where it is used


def test_tensors_that_do_not_grow_are_whole_and_sums_are_sums() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.net = nn.Embedding(6, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            bias = self.table(torch.arange(6, device=x.device))
            total = torch.zeros((), device=x.device)
            for layer in self.net:
                x = torch.nn.functional.layer_norm(layer(x) + bias, (8,))
                total = total + x.sum()
            return total * 2

    graph = capture(meta(Table), Example(args=(torch.zeros(2, 6, 8),)), name="table")
    found = {(t.split, t.elements > 0, t.fixed > 0, t.grad) for t in graph.tensors if t.source >= 0}
    assert found == {("concat", True, False, True), ("whole", False, True, True), ("sum", False, True, True)}


def test_batch_norm_mixes_samples() -> None:
    graph = capture(meta(models.Resnet), Example(args=(torch.zeros(2, 3, 16, 16),)), name="resnet")
    assert {kind for block in graph.blocks for kind in block.mixes_samples} == {"batch_norm"}
    assert graph.buffers == sum(b.numel() for b in models.Resnet().buffers())


def test_captures_are_equal_and_the_digest_is_of_the_content() -> None:
    one, again = (
        capture(meta(models.Gpt, 2), Example(args=(models.ids(batch),)), name=name)
        for batch, name in ((2, "gpt"), (5, "other"))
    )
    assert again.digest == one.digest == digest_of(one) and msgspec.structs.replace(again, name="gpt") == one
    assert capture(meta(models.Gpt, 1), Example(args=(models.ids(2),)), name="gpt").digest != one.digest


def test_modes_of_modules_are_left_as_they_were() -> None:
    model = meta(models.Resnet).eval()
    model.fc.train()  # type: ignore[operator]
    capture(model, Example(args=(torch.zeros(2, 3, 16, 16),)), name="resnet")
    assert model.fc.training and not model.training and not model.stem.training  # type: ignore[union-attr]


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ModelError, match="no batch dimension"):
        capture(models.Gpt(), Example(args=(torch.tensor(1),)), name="gpt")
    with pytest.raises(ModelError, match="no inputs"):
        capture(models.Gpt(), Example(), name="gpt")
    with pytest.raises(UsageError, match="at least one block"):
        capture(models.Gpt(), Example(args=(models.ids(2),)), name="gpt", max_blocks=0)


def test_no_weights_are_needed() -> None:
    """A layer of 10^12 weights: only a capture that allocates nothing gets through, and quickly."""
    started = time.process_time()
    model = meta(nn.Linear, 10**6, 10**6)
    graph = capture(model, Example(args=(torch.empty(1, 10**6, device="meta"),)), name="huge")
    assert graph.flops == 2 * 2 * 10**12 and time.process_time() - started < 20
