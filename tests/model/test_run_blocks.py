"""Blocks run one after another against the whole model: outputs, gradients, ties, other batch sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from isthmus.errors import ModelError, UsageError
from isthmus.model.capture import Example, capture
from isthmus.model.graph import UNMEASURED
from isthmus.model.runnable_blocks import Pieces, cut

from . import models


def example(*args: Tensor, **kwargs: Tensor) -> Example:
    return Example(args=args, kwargs=kwargs)


def one(*args: Tensor, **kwargs: Tensor) -> Example:
    """The same inputs with another batch size than they will be run with."""
    return Example(args=tuple(a[:1] for a in args), kwargs={k: a[:1] for k, a in kwargs.items()})


def assert_same(model: nn.Module, pieces: Pieces, args: tuple[Tensor, ...] = (), **kwargs: Tensor) -> None:
    """Equal outputs (in structure too), equal gradients, equal state afterwards."""
    model.train()
    state = copy.deepcopy(model.state_dict())
    whole = model(*args, **kwargs)
    whole_grads, whole_state = grads(model, whole), copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    parts = pieces.run(*args, **kwargs)
    assert type(parts) is type(whole)
    for a, b in zip(leaves(whole), leaves(parts), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
    part_grads = grads(model, parts)
    assert whole_grads.keys() == part_grads.keys() and whole_grads
    for name in whole_grads:
        torch.testing.assert_close(part_grads[name], whole_grads[name], rtol=1e-4, atol=1e-5)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, whole_state[name])


def leaves(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def grads(model: nn.Module, output: Any) -> dict[str, Tensor]:
    model.zero_grad()
    torch.stack([leaf.square().sum() for leaf in leaves(output) if leaf.requires_grad]).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_passes_only_listed_tensors(pieces: Pieces) -> None:
    """What each block takes was given by an earlier block or is an input, and the graph lists exactly that."""
    graph = pieces.graph
    taken = {(tensor.name, target) for tensor in graph.tensors for target in tensor.targets}
    assert taken == {(name, i) for i, names in enumerate(pieces.incoming) for name in names}
    for tensor in graph.tensors:
        assert all(target > tensor.source for target in tensor.targets)
        assert tensor.name in (pieces.inputs if tensor.source < 0 else pieces.outgoing[tensor.source])


def assert_parameters_findable(model: nn.Module, pieces: Pieces) -> None:
    original = dict(model.named_parameters(remove_duplicate=False))
    for block, module in zip(pieces.graph.blocks, pieces.blocks, strict=True):
        own = dict(module.named_parameters(remove_duplicate=False))
        assert set(block.parameters) == set(own)
        assert all(original[name] is parameter for name, parameter in own.items())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "gpt": (models.Gpt, (models.ids(3),)),
    "bert": (models.Bert, (models.ids(3),)),
    "resnet": (models.Resnet, (torch.randn(3, 3, 16, 16),)),
    "encoder-decoder": (models.Decoder, (models.ids(3), models.ids(3, length=12, seed=1))),
    "towers": (models.Towers, (torch.randn(3, 8, 32),)),
    "fixed batch": (models.FixedBatch, (torch.randn(3, 6),)),
    "child modules": (models.chain, (torch.randn(3, 4),)),
    "whole model": (models.PerSampleWhole, (torch.randn(3, 4),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_equal_the_whole_model(name: str) -> None:
    build, args = MODELS[name]
    torch.manual_seed(0)
    model = build()
    pieces = cut(model, one(*args), name=name)
    assert_same(model, pieces, args)
    assert_passes_only_listed_tensors(pieces)
    assert_parameters_findable(model, pieces)


@pytest.mark.parametrize("name", ["gpt", "resnet", "fixed batch", "child modules"])
def test_a_model_without_weights_gives_the_same_graph(name: str) -> None:
    build, args = MODELS[name]
    with torch.device("meta"):
        model = build()
    bare, built = capture(model, example(*args), name="m"), cut(build(), one(*args), name="m").graph
    assert bare.digest == built.digest and not any(block.unproven for block in built.blocks)
    if bare.how == "export":
        assert bare == built
    else:
        assert all(block.unproven == (UNMEASURED,) for block in bare.blocks)


def test_ties_stay_one_parameter() -> None:
    model = models.Gpt()
    pieces = cut(model, example(models.ids(2)), name="gpt")
    holders = [i for i, block in enumerate(pieces.graph.blocks) if "wte.weight" in block.parameters]
    assert holders == [0, len(pieces.blocks) - 1]
    assert all(dict(pieces.blocks[i].named_parameters())["wte.weight"] is model.wte.weight for i in holders)
    assert pieces.graph.parameter["wte.weight"].ties == ("head.weight",)


def test_code_that_takes_the_batch_as_a_number_is_run_as_it_is() -> None:
    graph = cut(models.FixedBatch(), example(torch.randn(2, 6)), name="fixed").graph
    assert graph.how == "modules" and len(graph.blocks) == 1
    assert graph.blocks[0].forward_flops == 2 * (6 * 8 + 2 * 4 * 4)


def test_other_inputs_than_captured_are_refused() -> None:
    pieces = cut(models.Resnet(), example(torch.randn(2, 3, 16, 16)), name="resnet")
    with pytest.raises(UsageError, match="image, given as in the example"):
        pieces.run(y=torch.randn(2, 3, 16, 16))


def test_what_needs_data_is_refused() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum().item() > 0 else x

    with pytest.raises(ModelError, match="neither be exported nor run without data"):
        capture(Asks(), example(torch.randn(2, 4)), name="asks")


def transformers_models() -> dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]]:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
        ViTConfig,
        ViTForImageClassification,
    )

    ids, text = (
        models.ids(3),
        {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False},
    )
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    vit = {"image_size": 16, "patch_size": 4, "num_labels": 5}
    return {
        "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**text, **gpt2)), {"input_ids": ids}),
        "bert": (
            lambda: BertForMaskedLM(BertConfig(vocab_size=50, **size, **none)),
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        ),
        "t5": (
            lambda: T5ForConditionalGeneration(T5Config(**text, **t5)),
            {"input_ids": ids, "decoder_input_ids": models.ids(3, seed=1)},
        ),
        "vit": (
            lambda: ViTForImageClassification(ViTConfig(**vit, **size, **none)),
            {"pixel_values": torch.randn(3, 3, 16, 16)},
        ),
        "llama": (lambda: LlamaForCausalLM(LlamaConfig(**text, **size, num_key_value_heads=2)), {"input_ids": ids}),
        "mixtral": (
            lambda: MixtralForCausalLM(MixtralConfig(**text, **size, num_key_value_heads=2, num_local_experts=4)),
            {"input_ids": ids},
        ),
    }


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit", "llama", "mixtral"])
def test_transformers_architectures(name: str) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    build, kwargs = transformers_models()[name]
    torch.manual_seed(0)
    model = build()
    pieces = cut(model, one(**kwargs), name=name)
    assert_same(model, pieces, **kwargs)
    assert_passes_only_listed_tensors(pieces)
    assert len(pieces.blocks) >= 4 and pieces.graph.how == "export"
    if name == "mixtral":  # its code takes another way on the meta device
        with torch.device("meta"):
            assert capture(build(), one(**kwargs), name=name) == pieces.graph
    if name in ("llama", "mixtral"):
        assert {b.tensor.heads for b in pieces.graph.blocks if b.tensor} == {2, 64}  # key-value heads, width inside


class Drawn(nn.Module):
    """A random graph of layers: each step names the layer and which earlier values it reads."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.own = nn.ModuleList([self._layer(kind) for kind, _, _ in steps])
        self.shared = nn.Linear(8, 8)

    @staticmethod
    def _layer(kind: str) -> nn.Module:
        layers = {"linear": nn.Linear(8, 8), "conv": nn.Conv1d(4, 4, 3, padding=1), "narrow": nn.Linear(16, 8)}
        return layers.get(kind) or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for (kind, first, second), layer in zip(self.steps, self.own, strict=True):
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(self._step(kind, layer, a, b))
        return torch.stack(values[-3:]).sum(0)

    def _step(self, kind: str, layer: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        if kind in ("linear", "conv"):
            return layer(a)
        if kind == "narrow":
            return layer(torch.cat([a, b], dim=2))
        if kind == "shared":
            return self.shared(a)
        if kind == "scale":
            return a.reshape(a.shape[0] * 4, 8).mul(0.5).view(a.shape[0], 4, 8).sigmoid_()
        return torch.tanh(a) if kind == "tanh" else a + b


steps = st.tuples(
    st.sampled_from(["linear", "conv", "narrow", "shared", "scale", "tanh", "add"]),
    st.integers(0, 8),
    st.integers(0, 8),
)


@settings(max_examples=10)
@given(drawn=st.lists(steps, min_size=2, max_size=9), limit=st.integers(1, 6))
def test_random_graphs(drawn: list[tuple[str, int, int]], limit: int) -> None:
    torch.manual_seed(0)
    model = Drawn([("linear", 0, 0), *drawn])
    x = torch.randn(3, 4, 8)
    pieces = cut(model, one(x), name="drawn", max_blocks=limit)
    assert 1 <= len(pieces.blocks) <= limit
    assert_same(model, pieces, (x,))
    assert_passes_only_listed_tensors(pieces)


class Odds(nn.Module):
    """A layer dropped with probability p, by a number that may be changed; a parameter and a buffer nobody reads."""

    def __init__(self, p: float, *, moved: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.unused, self.p, self.moved = nn.Parameter(torch.ones(3)), p, moved
        self.register_buffer("unread", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(x)) + x.new_ones(4)
        coin = torch.rand([])
        if self.moved:
            coin.sub_(1)
        return x if coin < self.p else self.second(x)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_coin_that_falls_on_one_side_is_followed(p: float) -> None:
    model, x = Odds(p), torch.randn(3, 4)
    pieces = cut(model, one(x), name="odds")
    assert_same(model, pieces, (x,))
    used = {"first.weight", "first.bias"} | ({"second.weight", "second.bias"} if p == 0 else set())
    assert pieces.graph.how == "export" and set(pieces.graph.parameter) == used
    assert not any(block.mixes_samples for block in pieces.graph.blocks)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert pieces.rest.keys() == {"unread"} | trained - used


@pytest.mark.parametrize("model", [Odds(0.5), Odds(0.0, moved=True)], ids=["either side", "another number"])
def test_other_coins_are_not(model: nn.Module) -> None:
    with pytest.raises(ModelError, match="neither be exported nor run without data"):
        cut(model, one(torch.randn(3, 4)), name="odds")


def test_a_whole_model_moves_with_its_own_buffers() -> None:
    class Scaled(models.PerSampleWhole):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            left, right = super().forward(x)
            return left * self.scale, right

    pieces = cut(Scaled(), one(torch.randn(3, 4)), name="scaled")
    (block,) = pieces.blocks
    block.to(torch.float64)
    assert {t.dtype for t in (*block.parameters(), *block.buffers())} == {torch.float64} and not pieces.rest
    assert pieces.run(torch.randn(3, 4, dtype=torch.float64))[0].dtype == torch.float64
