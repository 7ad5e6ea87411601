"""The zoo against published figures and against transformers' own implementations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from isthmus.errors import ModelError
from isthmus.model import zoo
from isthmus.model.runnable_blocks import Pieces, cut
from isthmus.model.zoo.bert import Bert, BertSpans, Sizes
from isthmus.model.zoo.gpt import GPT
from isthmus.model.zoo.inception import Inception
from isthmus.model.zoo.llama import Llama
from isthmus.model.zoo.mixtral import Mixtral, Mixture
from isthmus.model.zoo.opt import OPT
from isthmus.model.zoo.roberta import Roberta
from isthmus.model.zoo.synthetic import cross_entropy, masked_tokens, next_tokens, spans
from isthmus.model.zoo.t5 import T5
from isthmus.model.zoo.tiny import CNN, MLP
from isthmus.model.zoo.transformer import Transformer
from isthmus.model.zoo.vision import VGG, ResNet
from isthmus.model.zoo.vit import ViT
from isthmus.model.zoo.xlnet import XLNet

from . import models
from .test_run_blocks import assert_passes_only_listed_tensors, assert_same, example

# torchvision's documentation (inception-v3 without its auxiliary classifier), the GPT-2 and Llama 3 releases; others
# are compared with transformers below
PUBLISHED = {
    "vgg19": 143_667_240,
    "inception-v3": 23_834_568,
    "resnet101": 44_549_160,
    "wideresnet101": 126_886_696,
    "vit-large": 304_326_632,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}
MILLIONS = {  # as their papers round them; TAG's BERTs: embeddings, layers as wide inside as outside, two outputs
    "transformer": 65,
    "bert-small": 28.8,
    "opt-175b": 175_000,
    "t5-11b": 11_300,
    "mixtral-8x7b": 46_700,
    "tag-bert-small": (305_220 + 512) * 1024e-6 + 4 * 6 * 1.024**2,
    "tag-bert-large": (305_220 + 1024) * 2048e-6 + 24 * 6 * 2.048**2,
    "tag-transformer": 3 * 50_000 * 512e-6 + 6 * (12 + 16) * 0.512**2,
}
GPT3_MILLIONS = {"1.3b": 1320, "2.7b": 2650, "6.7b": 6660, "13b": 12850, "175b": 174600}  # its paper, table D.1

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 64,
}  # in transformers' words
SIZES = Sizes(layers=2, width=32, heads=4, inner=128, longest=16, vocabulary=64, dropout=0.0)  # in ours


@cache
def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return zoo.build(name).module


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    assert count(on_meta(name)) == PUBLISHED[name]


@pytest.mark.parametrize("size", GPT3_MILLIONS)
def test_gpt3_counts_agree_with_its_paper(size: str) -> None:
    assert count(on_meta(f"gpt3-{size}")) / 1e6 == pytest.approx(GPT3_MILLIONS[size], rel=0.004)


@pytest.mark.parametrize("name", MILLIONS)
def test_counts_agree_with_rounded_ones(name: str) -> None:
    assert count(on_meta(name)) / 1e6 == pytest.approx(MILLIONS[name], rel=0.031 if name == "transformer" else 0.003)


def transformers_of(name: str, library: ModuleType) -> nn.Module:
    """The same model by transformers."""
    wide = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    small = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
    tag = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 1024}
    t5 = {"d_model": 1024, "d_ff": 65536, "d_kv": 128, "num_heads": 128, "num_layers": 24}
    opt = {"hidden_size": 12288, "num_hidden_layers": 96, "num_attention_heads": 96, "ffn_dim": 49152}
    roberta = {"max_position_embeddings": 514, "type_vocab_size": 1}
    build: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: library.GPT2LMHeadModel(library.GPT2Config()),
        "bert-small": lambda: library.BertForMaskedLM(library.BertConfig(**small)),
        "bert-large": lambda: library.BertForMaskedLM(library.BertConfig(**wide)),
        "tag-bert-small": lambda: library.BertForQuestionAnswering(library.BertConfig(vocab_size=305_220, **tag)),
        "roberta-large": lambda: library.RobertaForMaskedLM(library.RobertaConfig(**wide, **roberta)),
        "xlnet-large": lambda: library.XLNetLMHeadModel(library.XLNetConfig()),
        "opt-175b": lambda: library.OPTForCausalLM(library.OPTConfig(word_embed_proj_dim=12288, **opt)),
        "t5-11b": lambda: library.T5ForConditionalGeneration(library.T5Config(**t5)),
        "mixtral-8x7b": lambda: library.MixtralForCausalLM(library.MixtralConfig()),
        "vit-large": lambda: library.ViTForImageClassification(library.ViTConfig(num_labels=1000, **wide)),
    }
    with torch.device("meta"):
        return build[name]()


BY_TRANSFORMERS = ["gpt2", "bert-small", "bert-large", "tag-bert-small", "roberta-large", "opt-175b", "t5-11b"]
BY_TRANSFORMERS += ["mixtral-8x7b", "vit-large"]


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_counts_equal_those_of_transformers(name: str, transformers: ModuleType) -> None:
    assert count(on_meta(name)) == count(transformers_of(name, transformers))


def test_the_documentation_names_every_model_with_its_parameters() -> None:
    page = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| ([\d,]+) \|", page, re.MULTILINE))
    assert rows == {name: f"{count(on_meta(name)):,}" for name in zoo.names()}


def test_xlnet_has_all_but_the_vector_of_the_second_stream(transformers: ModuleType) -> None:
    theirs = transformers_of("xlnet-large", transformers)
    assert count(on_meta("xlnet-large")) == count(theirs) - theirs.transformer.mask_emb.numel()


@pytest.mark.parametrize(
    ("name", "size", "macs"),
    [
        ("vgg19", 224, 19.63e9),
        ("inception-v3", 299, 5.71e9),
        ("resnet101", 224, 7.80e9),
        ("wideresnet101", 224, 22.75e9),
        ("vit-large", 224, 61.55e9),
    ],
)
def test_published_multiplications_of_vision_models(name: str, size: int, macs: float) -> None:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        on_meta(name)(torch.empty(2, 3, size, size))
    assert counter.get_total_flops() / 4 == pytest.approx(macs, rel=0.01)


def copy_into(model: nn.Module, other: nn.Module, transposed: tuple[str, ...] = ()) -> None:
    """Copies parameters by name; every one of ours must have its namesake there."""
    theirs = other.state_dict()
    for name, value in model.named_parameters():
        found = theirs[name]
        with torch.no_grad():
            value.copy_(found.T if name.endswith(transposed) and transposed else found)


def test_gpt_computes_what_transformers_computes(transformers: ModuleType) -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=64)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = GPT(layers=2, width=32, heads=4, longest=16, vocabulary=64).eval()
    copy_into(ours, theirs, transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    tokens = torch.randint(64, (3, 12))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


def test_bert_computes_what_transformers_computes(transformers: ModuleType) -> None:
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**TINY, max_position_embeddings=16)).eval()
    ours = Bert(SIZES).eval()
    copy_into(ours, theirs)
    tokens = torch.randint(64, (3, 12))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


def test_answer_spans_are_what_transformers_computes(transformers: ModuleType) -> None:
    config = transformers.BertConfig(**TINY, max_position_embeddings=16)
    theirs = transformers.BertForQuestionAnswering(config).eval()
    ours = BertSpans(SIZES).eval()
    copy_into(ours, theirs)
    tokens = torch.randint(64, (3, 12))
    answers = theirs(tokens)
    torch.testing.assert_close(ours(tokens), torch.stack((answers.start_logits, answers.end_logits), dim=1))


def test_roberta_computes_what_transformers_computes(transformers: ModuleType) -> None:
    config = transformers.RobertaConfig(**TINY, max_position_embeddings=18, type_vocab_size=1, layer_norm_eps=1e-5)
    theirs = transformers.RobertaForMaskedLM(config).eval()
    ours = Roberta(replace(SIZES, segments=1, offset=2, epsilon=1e-5)).eval()
    copy_into(ours, theirs)
    tokens = torch.randint(2, 64, (3, 12))  # token 1 is padding there
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


def test_opt_computes_what_transformers_computes(transformers: ModuleType) -> None:
    config = transformers.OPTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=128,
        vocab_size=64,
        max_position_embeddings=16,
        word_embed_proj_dim=32,
    )
    theirs = transformers.OPTForCausalLM(config).eval()
    ours = OPT(layers=2, width=32, heads=4, longest=16, vocabulary=64).eval()
    copy_into(ours, theirs)
    tokens = torch.randint(64, (3, 12))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


def test_t5_computes_what_transformers_computes(transformers: ModuleType) -> None:
    config = transformers.T5Config(d_model=32, d_ff=48, d_kv=16, num_heads=4, num_layers=2, vocab_size=64)
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    ours = T5(layers=2, width=32, heads=4, size=16, inner=48, vocabulary=64).eval()
    copy_into(ours, theirs)
    source, written = torch.randint(64, (2, 150)), torch.randint(64, (2, 140))  # farther than the farthest bucket
    there = theirs(input_ids=source, decoder_input_ids=written, use_cache=False)
    torch.testing.assert_close(ours(source, written), there.logits)


def test_vit_computes_what_transformers_computes(transformers: ModuleType) -> None:
    sizes = {key: value for key, value in TINY.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5, layer_norm_eps=1e-6)
    theirs = transformers.ViTForImageClassification(config).eval()
    ours = ViT(layers=2, width=32, heads=4, size=16, patch=4, classes=5).eval()
    copy_into(ours, theirs)
    image = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(ours(image), theirs(image).logits)


def test_mixtral_computes_what_transformers_computes(transformers: ModuleType) -> None:
    config = transformers.MixtralConfig(**{**TINY, "intermediate_size": 48}, num_key_value_heads=2)
    theirs = transformers.MixtralForCausalLM(config).eval()
    ours = Mixtral(layers=2, width=32, heads=4, kv_heads=2, inner=48, vocabulary=64).eval()
    copy_into(ours, theirs)
    tokens = torch.randint(64, (3, 12))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


def test_xlnet_computes_what_transformers_computes(transformers: ModuleType) -> None:
    config = transformers.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=64)
    theirs = transformers.XLNetLMHeadModel(config).eval()
    ours = XLNet(layers=2, width=32, heads=4, inner=64, vocabulary=64).eval()
    given = dict(theirs.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in ours.named_parameters():
            if name in given:
                value.copy_(given[name])
            else:  # there projections are [width, heads, size]
                found = given[name.removesuffix(".weight")].flatten(1)
                value.copy_(found if name.endswith("o.weight") else found.T)
    tokens, second = torch.randint(64, (3, 12)), torch.arange(12) >= 6
    there = theirs(tokens, token_type_ids=second.long().expand(3, -1)).logits
    torch.testing.assert_close(ours(tokens), there)


def copy_attention(ours: nn.Module, theirs: nn.MultiheadAttention) -> None:
    theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
    theirs.out_proj.weight.copy_(ours.output.weight)
    theirs.in_proj_bias.zero_()
    theirs.out_proj.bias.zero_()


def torch_layer(ours: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """torch's own layer with our weights."""
    theirs = kind(32, 4, 48, dropout=0.0, batch_first=True)
    with torch.no_grad():
        copy_attention(ours.attention, theirs.self_attn)
        norms = [ours.attention_norm, ours.mlp_norm]
        if kind is nn.TransformerDecoderLayer:
            copy_attention(ours.cross, theirs.multihead_attn)
            norms.insert(1, ours.cross_norm)
        parts = {"linear1": ours.mlp[0], "linear2": ours.mlp[2]}
        parts |= {f"norm{number}": norm for number, norm in enumerate(norms, 1)}
        for name, part in parts.items():
            theirs.get_submodule(name).load_state_dict(part.state_dict())
    return theirs


def test_transformer_computes_what_torch_computes() -> None:
    torch.manual_seed(0)
    ours = Transformer(layers=2, width=32, heads=4, inner=48, vocabulary=64, dropout=0.0)
    source, written = torch.randint(64, (3, 9)), torch.randint(64, (3, 7))
    waves = torch.tensor(
        [[(math.cos if i % 2 else math.sin)(t / 10000 ** (i // 2 * 2 / 32)) for i in range(32)] for t in range(9)]
    )
    memory, x = (ours.source.weight[t] * math.sqrt(32) + waves[: t.shape[1]] for t in (source, written))
    for layer in ours.encoder:
        memory = torch_layer(layer, nn.TransformerEncoderLayer)(memory)
    mask = torch.full((7, 7), -math.inf).triu(1)
    for layer in ours.decoder:
        x = torch_layer(layer, nn.TransformerDecoderLayer)(x, memory, tgt_mask=mask)
    torch.testing.assert_close(ours(source, written), x @ ours.source.weight.T, rtol=1e-4, atol=1e-4)


def by_token(mixture: Mixture, token: Tensor) -> Tensor:
    """What the paper writes for one token: the two best experts, weighted by the softmax of their two scores."""
    scores = mixture.gate.weight @ token
    best = sorted(range(len(scores)), key=lambda expert: -scores[expert].item())[:2]
    result = torch.zeros_like(token)
    for expert, weight in zip(best, torch.softmax(scores[best], dim=0), strict=True):
        gate, up = (mixture.experts.gate_up_proj[expert] @ token).chunk(2)
        result = result + weight * (mixture.experts.down_proj[expert] @ (gate * torch.sigmoid(gate) * up))
    return result


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_mixture_equals_a_loop_over_its_tokens(one_sided: bool) -> None:
    """Also where most experts get no token; gradients too."""
    torch.manual_seed(0)
    mixture = Mixture(width=16, inner=24, experts=8, chosen=2)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 7, 16)
    x = x.abs() if one_sided else x
    if one_sided:
        with torch.no_grad():
            mixture.gate.weight[3:5] = 5.0 * mixture.gate.weight[3:5].abs()
    tokens = [x.clone().requires_grad_() for _ in range(2)]
    loop = torch.stack([by_token(mixture, token) for token in tokens[0].flatten(0, 1)]).view_as(x)
    grouped = mixture(tokens[1])
    torch.testing.assert_close(grouped, loop, rtol=1e-4, atol=1e-4)
    expected = torch.autograd.grad(loop.square().sum(), [*mixture.parameters(), tokens[0]])
    found = torch.autograd.grad(grouped.square().sum(), [*mixture.parameters(), tokens[1]])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_llama_computes_what_transformers_computes(transformers: ModuleType) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = Llama(layers=2, width=32, heads=4, kv_heads=2, inner=48, vocabulary=64).eval()
    copy_into(ours, theirs)
    tokens = torch.randint(64, (3, 12))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


EACH_KIND = ["vgg19", "inception-v3", "resnet101", "vit-large", "transformer", "bert-large", "gpt2", "llama3-8b"]
EACH_KIND += ["tag-bert-small", "mlp-tiny", "cnn-tiny"]


@pytest.mark.parametrize("name", EACH_KIND)
def test_each_kind_of_model_gives_logits_for_its_targets(name: str) -> None:
    short = None if zoo.sequence_of(name) is None else 4
    with torch.device("meta"):
        built = zoo.build(name, short)
        logits = built.module(*built.example(2).args)
    target = built.targets(2, device="cpu")
    assert logits.shape[:-1] == target.shape
    assert target.max() < logits.shape[-1]
    assert built.sequence == short


@pytest.mark.parametrize("name", ["gpt-tiny", "mlp-tiny", "cnn-tiny"])
def test_tiny_models_learn(name: str) -> None:
    torch.manual_seed(0)
    built = zoo.build(name, 16 if name == "gpt-tiny" else None)
    optimizer = torch.optim.Adam(built.module.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        total, number = built.loss(built.module(*built.example(8).args), built.targets(8))
        optimizer.zero_grad()
        (total / number).backward()
        optimizer.step()
        losses.append(total.item())
    assert losses[-1] < 0.8 * losses[0]


def test_gpt_tiny_has_about_five_million_parameters() -> None:
    assert count(on_meta("gpt-tiny")) == pytest.approx(5e6, rel=0.05)


def test_cnn_tiny_has_batch_norm_and_dropout_is_as_published() -> None:
    assert any(isinstance(module, nn.BatchNorm2d) for module in on_meta("cnn-tiny").modules())
    rates = {name: {m.p for m in on_meta(name).modules() if isinstance(m, nn.Dropout)} for name in zoo.names()}
    for name in (
        "gpt2",
        "bert-large",
        "roberta-large",
        "xlnet-large",
        "opt-175b",
        "t5-11b",
        "transformer",
        "vit-large",
    ):
        assert rates[name] == {0.1}
    assert rates["vgg19"] == rates["inception-v3"] == {0.5}
    assert rates["gpt3-175b"] == {0.0}
    assert not rates["llama3-8b"] and not rates["mixtral-8x7b"]


def test_heads_are_tied_where_the_original_ties_them() -> None:
    gpt, bert, llama = on_meta("gpt2"), on_meta("bert-large"), on_meta("llama3-8b")
    assert gpt.lm_head.weight is gpt.transformer.wte.weight
    assert bert.cls.predictions.decoder.weight is bert.bert.embeddings.word_embeddings.weight
    assert llama.lm_head.weight is not llama.model.embed_tokens.weight
    for name in ("transformer", "roberta-large", "xlnet-large", "opt-175b", "t5-11b"):
        assert sum(tuple(p.shape) == HEADS[name] for p in on_meta(name).parameters()) == 1
    assert sum(p.shape[0] == 50_000 for p in on_meta("tag-transformer").parameters()) == 3


HEADS = {
    "transformer": (37_000, 512),
    "roberta-large": (50_265, 1024),
    "xlnet-large": (32_000, 1024),
    "opt-175b": (50_272, 12288),
    "t5-11b": (32_128, 1024),
}


def image(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, size, size),)


TEXT = (models.ids(2),)
PAIR = (models.ids(2), models.ids(2, seed=1))
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "mlp": (lambda: MLP(features=8, width=16, layers=3, classes=4), (torch.randn(2, 8),)),
    "cnn": (lambda: CNN(channels=(4, 8), classes=4), image(8)),
    "vgg": (lambda: VGG(convolutions=(1, 1, 1, 1, 1), width=8, classes=4, dropout=0.0), image(32)),
    "resnet": (lambda: ResNet(bottlenecks=(1, 1, 1, 1), classes=4), image(32)),
    "inception": (lambda: Inception(classes=4, dropout=0.0), image(75)),
    "gpt": (lambda: GPT(layers=2, width=32, heads=4, longest=16, vocabulary=64, dropout=0.0), TEXT),
    "bert": (lambda: Bert(SIZES), TEXT),
    "xlnet": (lambda: XLNet(layers=1, width=32, heads=4, inner=64, vocabulary=64, dropout=0.0), TEXT),
    "mixtral": (lambda: Mixtral(layers=1, width=32, heads=4, kv_heads=2, inner=48, vocabulary=64), TEXT),
    "transformer": (
        lambda: Transformer(layers=1, width=32, heads=4, inner=48, vocabulary=64, dropout=0.0),
        PAIR,
    ),
    "t5": (lambda: T5(layers=2, width=32, heads=4, size=16, inner=48, vocabulary=64, dropout=0.0), PAIR),
}


@cache
def small(name: str) -> tuple[nn.Module, Pieces]:
    build, inputs = SMALL[name]
    torch.manual_seed(0)
    model = build()
    return model, cut(model, example(*inputs), name=name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow("a wide graph")) if name == "inception" else name for name in SMALL],
)
def test_blocks_one_after_another_equal_the_whole(name: str) -> None:
    model, pieces = small(name)
    assert pieces.graph.how == "export" and len(pieces.blocks) > 1
    assert_same(model, pieces, SMALL[name][1])
    assert_passes_only_listed_tensors(pieces)


@pytest.mark.parametrize("name", ["gpt", "bert", "mixtral", "transformer", "t5"])
def test_tensor_groups_can_split_attention(name: str) -> None:
    splits = [block.tensor for block in small(name)[1].graph.blocks if block.tensor]
    heads = 2 if name == "mixtral" else 4  # it has two heads of keys and values for four of queries
    inner = {"gpt": 128, "bert": SIZES.inner}.get(name, 48)  # an MLP is divided by its width
    assert {split.heads for split in splits} == {heads, inner}


def test_nothing_is_split_where_no_work_is() -> None:
    """XLNet projects constants (distances): a row layer without column layers is no pair."""
    splits = [block.tensor for block in small("xlnet")[1].graph.blocks if block.tensor]
    assert len(splits) == 1 and all(split.flops > 0 and len(split.parameters) == 3 for split in splits)


def test_a_mixture_costs_the_chosen_experts_only() -> None:
    """Forward FLOPs of one sample: 2 per weight and token for what is used, and attention's two products."""
    layers, width, inner, length, chosen = 1, 32, 48, TEXT[0].shape[1], 2
    graph = small("mixtral")[1].graph
    attention = width * (width + 16 + 16 + width) + 2 * length * width
    used = layers * (attention + 8 * width + chosen * 3 * width * inner) + 64 * width
    assert sum(block.forward_flops for block in graph.blocks) == 2 * length * used
    assert not any(block.mixes_samples for block in graph.blocks)


def test_answers_end_where_they_start_or_later() -> None:
    _, target = spans(50, 3, vocabulary=40, sequence=8)
    assert bool((target[:, 0] <= target[:, 1]).all()) and set(target.unique().tolist()) == set(range(8))


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    example, target = masked_tokens(6, 3, vocabulary=40, sequence=8, mask=39)
    logits = torch.randn(*example.args[0].shape, 40, dtype=torch.float64)
    total, number = cross_entropy(logits, target)
    parts = [cross_entropy(logits[a:b], target[a:b]) for a, b in ((0, 1), (1, 4), (4, 6))]
    assert sum(part[0].item() for part in parts) == pytest.approx(total.item(), rel=1e-6)
    assert sum(part[1].item() for part in parts) == number.item() == (target != -100).sum().item()
    each = torch.log_softmax(logits, dim=-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    assert total.item() == pytest.approx(-each[target != -100].sum().item(), rel=1e-6)


def test_synthetic_data_follow_the_seed_and_nothing_else() -> None:
    first, target = next_tokens(3, 5, vocabulary=100, sequence=7)
    with torch.device("meta"):
        torch.manual_seed(1)
        again, _ = next_tokens(3, 5, vocabulary=100, sequence=7)
        other, _ = next_tokens(3, 6, vocabulary=100, sequence=7)
    assert torch.equal(first.args[0], again.args[0])
    assert not torch.equal(first.args[0], other.args[0])
    assert torch.equal(first.args[0][:, 1:], target[:, :-1])


@pytest.mark.parametrize(
    ("name", "sequence", "said"),
    [
        ("gpt2-x", None, "gpt2-xl"),
        ("nothing-like-it", None, "vgg19"),
        ("gpt2", 1025, "1 to 1024"),
        ("gpt2", 0, "1 to 1024"),
        ("llama3-8b", -1, "at least 1"),
        ("vgg19", 16, "no sequence"),
    ],
)
def test_what_cannot_be_built_is_said(name: str, sequence: int | None, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        zoo.build(name, sequence)


def test_llama_takes_any_length() -> None:
    assert zoo.sequence_of("llama3-8b", 100_000) == 100_000
