"""The zoo against published figures and against transformers' own implementations."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from isthmus.errors import ModelError
from isthmus.model import zoo
from isthmus.model.zoo.bert import Bert
from isthmus.model.zoo.gpt import GPT
from isthmus.model.zoo.llama import Llama
from isthmus.model.zoo.synthetic import cross_entropy, masked_tokens, next_tokens

# torchvision's documentation, the GPT-2 and Llama 3 releases; bert-large is compared with transformers below
PUBLISHED = {
    "vgg19": 143_667_240,
    "resnet101": 44_549_160,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}
GPT3_MILLIONS = {"1.3b": 1320, "2.7b": 2650, "6.7b": 6660, "13b": 12850, "175b": 174600}  # its paper, table D.1


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


def test_counts_equal_those_of_transformers(transformers: ModuleType) -> None:
    with torch.device("meta"):
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        bert = transformers.BertForMaskedLM(transformers.BertConfig(**large))
    assert count(on_meta("gpt2")) == count(gpt2)
    assert count(on_meta("bert-large")) == count(bert) == 335_174_458


@pytest.mark.parametrize(("name", "macs"), [("vgg19", 19.63e9), ("resnet101", 7.80e9)])
def test_published_multiplications_of_vision_models(name: str, macs: float) -> None:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        on_meta(name)(torch.empty(1, 3, 224, 224))
    assert counter.get_total_flops() / 2 == pytest.approx(macs, rel=0.01)


def copy_into(model: nn.Module, other: nn.Module, transposed: tuple[str, ...] = ()) -> None:
    """Copies parameters by name; every one of ours must have its namesake there."""
    theirs = other.state_dict()
    for name, value in model.state_dict().items():
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
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=64
    )
    theirs = transformers.BertForMaskedLM(config).eval()
    ours = Bert(layers=2, width=32, heads=4, vocabulary=64).eval()
    copy_into(ours, theirs)
    tokens = torch.randint(64, (3, 12))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


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


@pytest.mark.parametrize("name", ["vgg19", "resnet101", "bert-large", "gpt2", "llama3-8b", "mlp-tiny", "cnn-tiny"])
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
    assert rates["gpt2"] == rates["bert-large"] == {0.1}
    assert rates["vgg19"] == {0.5}
    assert rates["gpt3-175b"] == {0.0}
    assert not rates["llama3-8b"]


def test_heads_are_tied_where_the_original_ties_them() -> None:
    gpt, bert, llama = on_meta("gpt2"), on_meta("bert-large"), on_meta("llama3-8b")
    assert gpt.lm_head.weight is gpt.transformer.wte.weight
    assert bert.cls.predictions.decoder.weight is bert.bert.embeddings.word_embeddings.weight
    assert llama.lm_head.weight is not llama.model.embed_tokens.weight


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
