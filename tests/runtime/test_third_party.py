"""Models of other people, unmodified: trained in two uneven stages as in one process.

Where a configuration drops out by default, it does so here, and one stage is the judge, as plain torch draws other
numbers; elsewhere a plain loop is. Beside sizes, three settings are not the default: no cache of keys and values,
Wav2Vec2 drops no whole layers and masks nothing (both are decided by values), XLNet has no dropout (judged by a loop).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus.errors import ModelError
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Optimizer
from isthmus.model.torch_export import Example
from isthmus.model.zoo.synthetic import cross_entropy
from isthmus.plan.file import PlanFile
from isthmus.plan.types import Plan, Replica, Stage, Sync
from tests.runtime.world import Get, Result, Task, assert_same, pipeline_plan, reference, small_cluster, train

CLUSTER = small_cluster(devices=2)
FIRST, SECOND, THIRD = "h0/CPU/0", "h1/CPU/0", "h1/CPU/1"
BATCH, MICRO, STEPS, WORDS = 6, 2, 3, 40
SGD = Optimizer(name="sgd", learning_rate=0.1)

TEXT: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTHS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4
}  # fmt: skip
PLACES = {"max_position_embeddings": 16}
NO_CACHE = {"use_cache": False}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "word_embed_proj_dim": 32}
SWIN = {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 5}
RESNET = {"hidden_sizes": [8, 16], "depths": [2, 2], "embedding_size": 8, "layer_type": "basic", "num_labels": 5}
WAV2VEC2 = {
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
    "vocab_size": WORDS, "num_labels": 5, "layerdrop": 0.0, "apply_spec_augment": False,
}  # fmt: skip
CLIP = {
    "text_config": {**WIDTHS, **TEXT, **PLACES, "num_hidden_layers": 2},
    "vision_config": {**WIDTHS, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4},
    "projection_dim": 16,
}
XLNET = {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "dropout": 0.0}


def transformers(model: str, config: str, /, *, frozen: str = "-", **fields: Any) -> nn.Module:
    """A model of transformers with fresh weights, the same each time; what has `frozen` in its name is not trained."""
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    library = importlib.import_module("transformers")
    torch.manual_seed(7)
    made: nn.Module = getattr(library, model)(getattr(library, config)(**fields))
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(frozen not in name)
    return made.train()


def torchs_own() -> nn.Module:
    torch.manual_seed(7)
    return nn.Transformer(16, 4, 2, 2, 24, batch_first=True)


# -- samples


def drawn(shape: tuple[int, ...], numbers: Sequence[int]) -> Tensor:
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in numbers])


def whole(high: int, shape: tuple[int, ...], numbers: Sequence[int]) -> Tensor:
    return torch.stack([torch.randint(3, high, shape, generator=torch.Generator().manual_seed(n)) for n in numbers])


def tokens(numbers: Sequence[int], *, names: Sequence[str] = ("input_ids",), padded: bool = False) -> Any:
    """The next tokens are the targets, some of them ignored: samples count differently."""
    text = whole(WORDS, (9,), numbers)
    inputs, targets = {name: text[:, :-1].clone() for name in names}, text[:, 1:].clone()
    lengths = torch.tensor([8 - number % 4 for number in numbers])
    there = torch.arange(8) < lengths[:, None]
    if padded:
        inputs["attention_mask"] = there.long()
    return Example(args=(), kwargs=inputs), targets.masked_fill(~there, -100)


def classified(numbers: Sequence[int], *, name: str, shape: tuple[int, ...]) -> Any:
    return Example(args=(), kwargs={name: drawn(shape, numbers)}), whole(8, (), numbers) - 3


def captioned(numbers: Sequence[int]) -> Any:
    """Each caption belongs to the image beside it."""
    inputs = {"input_ids": whole(WORDS, (8,), numbers), "pixel_values": drawn((3, 16, 16), numbers)}
    return Example(args=(), kwargs=inputs), torch.arange(len(numbers))


def translated(numbers: Sequence[int]) -> Any:
    return Example(args=(drawn((6, 16), numbers), drawn((5, 16), numbers))), whole(16, (5,), numbers)


def contrasted(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(output.logits_per_image, target)


# -- models


@dataclass(frozen=True)
class Family:
    """`part` of the blocks are the first stage. `drops`: dropout as configured. One replica, or two unequal ones."""

    make: Callable[[], nn.Module]
    get: Get
    part: float
    drops: bool = False
    replicas: int = 2
    micro: int = MICRO
    loss: Callable[[Any, Tensor], tuple[Tensor, Tensor]] = cross_entropy


pairs: Get = partial(tokens, names=("input_ids", "decoder_input_ids"))
padded: Get = partial(tokens, padded=True)
images: Get = partial(classified, name="pixel_values", shape=(3, 32, 32))
sounds: Get = partial(classified, name="input_values", shape=(600,))
grouped = {**WIDTHS, **TEXT, **PLACES, **NO_CACHE, "num_key_value_heads": 2, "num_local_experts": 4}

FAMILIES = {
    "gpt2, tied": Family(
        partial(transformers, "GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=3, n_head=4, **TEXT, **NO_CACHE),
        tokens, 0.3, drops=True,
    ),
    "bert, padded": Family(
        partial(transformers, "BertForMaskedLM", "BertConfig", vocab_size=WORDS, **WIDTHS, **PLACES),
        padded, 0.7, drops=True,
    ),
    "albert, one layer used thrice": Family(
        partial(transformers, "AlbertForMaskedLM", "AlbertConfig", embedding_size=16, vocab_size=WORDS, **WIDTHS),
        tokens, 0.6,
    ),
    "t5, two parts": Family(
        partial(transformers, "T5ForConditionalGeneration", "T5Config", **T5, **TEXT, **NO_CACHE),
        pairs, 0.3, drops=True,
    ),
    "opt, layers that might be dropped": Family(
        partial(transformers, "OPTForCausalLM", "OPTConfig", **OPT, **TEXT, **PLACES, **NO_CACHE),
        padded, 0.3, drops=True, replicas=1,
    ),
    "mixtral, experts": Family(
        partial(transformers, "MixtralForCausalLM", "MixtralConfig", **grouped), tokens, 0.7,
    ),
    "bloom, places by slopes": Family(
        partial(transformers, "BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=3, n_head=4, **TEXT,
                **NO_CACHE),
        padded, 0.3, replicas=1,
    ),
    "mamba, no attention": Family(
        partial(transformers, "MambaForCausalLM", "MambaConfig", hidden_size=32, num_hidden_layers=2, state_size=4,
                **TEXT, **NO_CACHE),
        tokens, 0.7,
    ),
    "swin, paths dropped": Family(
        partial(transformers, "SwinForImageClassification", "SwinConfig", **SWIN), images, 0.4, drops=True,
    ),
    "resnet, batch norm": Family(
        partial(transformers, "ResNetForImageClassification", "ResNetConfig", **RESNET), images, 0.3,
    ),
    "wav2vec2, a part frozen, a parameter unused": Family(
        partial(transformers, "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", frozen="feature_extractor",
                **WAV2VEC2, **WIDTHS),
        sounds, 0.6, drops=True,
    ),
    "clip, samples compared": Family(
        partial(transformers, "CLIPModel", "CLIPConfig", **CLIP), captioned, 0.3, replicas=1, micro=1, loss=contrasted,
    ),
    "torch's own": Family(torchs_own, translated, 0.3, drops=True),
}  # fmt: skip


def two_stages(graph: BlockGraph, family: Family) -> tuple[list[Stage], list[Sync]]:
    """The first blocks on one device, the others on one or, two samples to one, on two."""
    names, cut = [block.name for block in graph.blocks], round(family.part * len(graph.blocks))
    assert 0 < cut < len(names) and cut != len(names) - cut
    shares = {SECOND: 2, THIRD: 1} if family.replicas == 2 else {SECOND: BATCH // family.micro}
    second = tuple(Replica(devices=(device,), share=share) for device, share in shares.items())
    stages = [
        Stage(first=names[0], last=names[cut - 1], replicas=(Replica(devices=(FIRST,), share=BATCH // family.micro),)),
        Stage(first=names[cut], last=names[-1], replicas=second),
    ]
    halves = graph.blocks[:cut], graph.blocks[cut:]
    before, after = ({name for block in half for name in block.parameters} for half in halves)
    both = tuple(parameter.name for parameter in graph.parameters if parameter.name in before & after)
    syncs = [Sync(bucket="both", how="ring", parameters=both, participants=(FIRST, *shares))] if both else []
    if len(shares) > 1:
        blocks = tuple(f"[{name}]" for name in names[cut:])
        syncs.append(Sync(bucket="second", how="ring", parameters=blocks, participants=tuple(shares)))
    return stages, syncs


def plain(task: Task, plan: Plan, rest: dict[str, Tensor]) -> Result:
    """The plain loop's result, of what is trained: whatever else the model has stayed as it was."""
    made, began = reference(task, plan, STEPS), dict(task.make().named_parameters())
    still = {name for name, parameter in began.items() if name in rest or not parameter.requires_grad}
    assert all(torch.equal(made.weights[name], began[name]) for name in still)
    return Result(made.losses, {name: tensor for name, tensor in made.weights.items() if name not in still})


QUICK = ("gpt2, tied", "bert, padded", "resnet, batch norm")


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in QUICK
        else pytest.param(name, marks=pytest.mark.slow("one more architecture of another library"))
        for name in FAMILIES
    ],
)
def test_two_uneven_stages(name: str) -> None:
    family = FAMILIES[name]
    task = Task(family.make, family.get, family.loss)
    pieces = task.pieces()
    assert pieces.graph.how == "export" and family.drops == any(pieces.draws)
    stages, syncs = two_stages(pieces.graph, family)
    plan = pipeline_plan(pieces, stages, syncs, batch=BATCH, micro_batches=family.micro, optimizer=SGD)
    found = train(task, plan, CLUSTER, pieces, STEPS)
    if family.drops:
        alone = Stage(first=stages[0].first, last=stages[1].last, replicas=stages[0].replicas)
        one = pipeline_plan(pieces, [alone], batch=BATCH, micro_batches=family.micro, optimizer=SGD)
        wanted = train(task, one, CLUSTER, pieces, STEPS)
    else:
        wanted = plain(task, plan, pieces.pieces.rest)
    assert_same(found, wanted)
    began = dict(task.make().named_parameters())
    assert any(not torch.equal(tensor, began[name]) for name, tensor in found.weights.items())


@pytest.mark.slow("one more architecture; `test_join` has loops of one's own in the fast set")
def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """XLNet, which has parameters that this task does not use: they stay in its state and in its checkpoints."""
    make = partial(transformers, "XLNetLMHeadModel", "XLNetConfig", **XLNET)
    batches = [tokens(range(step * BATCH, (step + 1) * BATCH)) for step in range(STEPS)]
    model, judge = make(), make()
    untouched = copy.deepcopy(model.state_dict())
    pieces = Task(make, tokens, cross_entropy).pieces()
    stages, syncs = two_stages(pieces.graph, Family(make, tokens, 0.7))
    plan = pipeline_plan(pieces, stages, syncs, batch=BATCH, micro_batches=MICRO, optimizer=SGD)
    planned = PlanFile(plan=plan, cluster=CLUSTER)
    optimizer, wanted = torch.optim.SGD(judge.parameters(), lr=0.1), []
    for example, targets in batches:
        loss, count = cross_entropy(judge(**example.kwargs), targets)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        wanted.append(loss.item() / int(count))
    with isthmus.join(planned, model, cross_entropy) as run:
        losses = [run.step((example.kwargs, targets)) for example, targets in batches[:2]]
        run.save(tmp_path)
    with isthmus.join(planned, model, cross_entropy, resume=tmp_path) as run:
        losses.append(run.step((batches[2][0].kwargs, batches[2][1])))
        state = run.state_dict()
    assert losses == pytest.approx(wanted, rel=1e-5)
    unused = {name for name, parameter in judge.named_parameters() if parameter.grad is None}
    assert unused and all(torch.equal(state[name], untouched[name]) for name in unused)
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(state, dict(judge.state_dict()), rtol=1e-5, atol=1e-6)
    model.load_state_dict(state)


DEBERTA = {"vocab_size": WORDS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], **WIDTHS, **PLACES}
DROPPED = {**OPT, **TEXT, **PLACES, **NO_CACHE, "num_hidden_layers": 1, "layerdrop": 0.5}
REFUSED = {
    "deberta draws for all samples at once": (
        partial(transformers, "DebertaV2ForMaskedLM", "DebertaV2Config", **DEBERTA),
        "dropout.default draws is not shaped by samples",
    ),
    "opt drops layers at random": (
        partial(transformers, "OPTForCausalLM", "OPTConfig", **DROPPED),
        "can neither be exported nor run without data",
    ),
}


@pytest.mark.slow("exports models of another library only to refuse them")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_the_same_everywhere_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(ModelError, match=text):
        Task(make, tokens, cross_entropy).pieces()
