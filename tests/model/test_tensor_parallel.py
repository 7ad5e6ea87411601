"""Blocks divided over a tensor group against whole blocks: outputs, every gradient, what is sent, what is refused."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from isthmus.errors import ModelError, UsageError
from isthmus.model.capture import Example
from isthmus.model.flow import flow_of
from isthmus.model.runnable_blocks import Pieces, cut
from isthmus.model.tensor_parallel.divide_pair import split_pair
from isthmus.model.tensor_parallel.division_rules import DividedTensor, reshaped
from isthmus.model.tensor_parallel.linear_pairs import find_pairs, linear_uses
from isthmus.model.tensor_parallel.member_blocks import MemberBlocks, ParameterSlice, divide_blocks
from isthmus.model.trace import trace
from isthmus.model.zoo.bert import Bert, Sizes
from isthmus.model.zoo.gpt import GPT
from isthmus.model.zoo.llama import Llama
from isthmus.model.zoo.mixtral import Mixtral
from isthmus.model.zoo.t5 import Stack

from . import models

Run = Callable[[nn.Module, list[Tensor]], tuple[Tensor, ...]]
TEXT = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}


class Group:
    """Members as threads: a tensor is added over them in member order, in place, when all have come."""

    def __init__(self, members: int) -> None:
        self.members, self.calls = members, 0
        self.slots: list[Any] = [None] * members
        self.barrier = threading.Barrier(members, timeout=60)

    def reduce(self, member: int) -> Callable[[Tensor], Tensor]:
        def add(tensor: Tensor) -> Tensor:
            assert tensor.is_contiguous()
            self.slots[member] = tensor.clone()
            self.barrier.wait()
            total = torch.stack(self.slots).sum(0)
            self.calls += member == 0
            self.barrier.wait()
            return tensor.copy_(total)

        return add

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def guarded(member: int) -> Any:
            try:
                return work(member)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.members) as pool:
            futures = [pool.submit(guarded, member) for member in range(self.members)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


def plainly(block: nn.Module, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return block(*inputs)  # type: ignore[no-any-return]


def computed(
    pieces: Pieces, blocks: tuple[nn.Module, ...], example: Example, run: Run = plainly
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The model's results, and the gradient of every parameter under a loss that weighs each element differently."""
    known = pieces.bind(example.args, example.kwargs)
    for block, taken, made in zip(blocks, pieces.incoming, pieces.outgoing, strict=True):
        known |= zip(made, run(block, [known[name] for name in taken]), strict=True)
    leaves = [leaf for leaf in pytree.tree_leaves(pieces.result(known)) if isinstance(leaf, Tensor)]
    loss = torch.stack([(t.square() * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in leaves]).sum()
    parameters = {name: p for block in blocks for name, p in block.named_parameters()}
    return leaves, dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def members_of(pieces: Pieces, group: Group) -> list[MemberBlocks]:
    blocks = range(len(pieces.blocks))
    return [
        divide_blocks(pieces, member=i, members=group.members, blocks=blocks, reduce=group.reduce(i))
        for i in range(group.members)
    ]


def assert_members_equal_the_whole(
    pieces: Pieces,
    example: Example,
    members: int,
    tolerance: float = 1e-11,
    run: Callable[[MemberBlocks | None], Run] | None = None,
) -> Group:
    group = Group(members)
    parts = members_of(pieces, group)
    way = run or (lambda own: plainly)
    outputs, gradients = computed(pieces, pieces.blocks, example, way(None))
    got = group.run(lambda i: computed(pieces, parts[i].blocks, example, way(parts[i])))
    promised = {name for block in pieces.graph.blocks if block.tensor for name in block.tensor.parameters}
    assert set(parts[0].slices) == promised and promised
    for leaves, _ in got:
        for leaf, whole in zip(leaves, outputs, strict=True):
            torch.testing.assert_close(leaf, whole, rtol=tolerance, atol=tolerance)
    for name, whole in gradients.items():
        ours = [grads[name] for _, grads in got]
        if name in promised:
            assert all(our.numel() * members == whole.numel() for our in ours)
            ours = [parts[0].slices[name].join(ours)]
        assert all(torch.equal(our, ours[0]) for our in ours)  # replicated: the same to the last bit
        torch.testing.assert_close(ours[0], whole, rtol=tolerance, atol=tolerance * float(1 + whole.abs().max()))
    return group


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(layers=1, width=32, heads=4, longest=16, vocabulary=50, dropout=0.0),
    "bert": lambda: Bert(Sizes(layers=1, width=32, heads=4, inner=64, longest=16, vocabulary=50, dropout=0.0)),
    "llama": lambda: Llama(layers=1, width=64, heads=8, kv_heads=4, inner=64, vocabulary=50),
}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**TEXT, **sizes))


def llama_hf() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**TEXT, **sizes, num_hidden_layers=1))


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@cache
def cut_family(build: Callable[[], nn.Module], keyword: bool) -> Pieces:
    torch.manual_seed(0)
    ids = models.ids(1)  # one sample: the runs have three
    example = Example(kwargs={"input_ids": ids}) if keyword else Example(args=(ids,))
    return cut(build(), example, name="family")


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_zoo_families(name: str, members: int) -> None:
    pieces = cut_family(FAMILIES[name], False)
    group = assert_members_equal_the_whole(pieces, Example(args=(models.ids(3),)), members)
    reduces = sum(block.tensor.reduces for block in pieces.graph.blocks if block.tensor)
    assert (reduces, group.calls) == (2, 4)  # as priced: forward and, once for each input of a pair, backward


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("build", [gpt2, llama_hf])
def test_transformers_families(build: Callable[[], nn.Module], members: int) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    pieces = cut_family(build, True)
    group = assert_members_equal_the_whole(pieces, Example(kwargs={"input_ids": models.ids(3)}), members)
    assert group.calls == 4


def test_a_trained_mask_is_cut_by_heads() -> None:
    torch.manual_seed(0)
    decoder = Stack(layers=1, width=16, heads=4, size=4, inner=24, dropout=0.0, decoder=True)
    args = (torch.randn(3, 6, 16), torch.randn(3, 5, 16))
    pieces = cut(decoder, Example(args=tuple(a[:1] for a in args)), name="t5")
    assert_members_equal_the_whole(pieces, Example(args=args), 4)


def test_torch_attention_whose_cross_attention_shares_a_weight() -> None:
    torch.manual_seed(0)
    args = (torch.randn(3, 6, 16), torch.randn(3, 5, 16))
    layer = nn.TransformerDecoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    pieces = cut(layer, Example(args=tuple(a[:1] for a in args)), name="decoder")
    assert_members_equal_the_whole(pieces, Example(args=args), 2)
    named = {name for block in pieces.graph.blocks if block.tensor for name in block.tensor.parameters}
    assert "self_attn.in_proj_weight" in named and not any("multihead_attn" in name for name in named)


def test_experts_in_single_precision() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = Mixtral(layers=1, width=32, heads=4, kv_heads=4, inner=64, vocabulary=50, experts=4)
    pieces = cut(model, Example(args=(models.ids(1),)), name="mixtral")
    assert_members_equal_the_whole(pieces, Example(args=(models.ids(3),)), 4, tolerance=1e-5)


class Styles(nn.Module):
    """Attention with 6 query heads of 4 and `shared` key and value heads, in one of the ways it is written; an MLP."""

    def __init__(self, style: str, shared: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.style, self.shared = style, shared
        self.qkv, self.out = nn.Linear(8, 4 * (6 + 2 * shared)), nn.Linear(24, 8)
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Parameter(torch.randn(12, 8))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self._heads(self.qkv(x), batch, length)
        if self.style == "merged":
            q, k, v = (t.reshape(batch * 6, length, 4) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(torch.ones(length, length).triu(1).bool(), -1e9)
        y = self.drop(scores.softmax(-1)) @ v
        x = x + self.out(y.view(batch, 6, length, 4).transpose(1, 2).flatten(2))
        return torch.matmul(self.drop(F.relu(self.up(x), inplace=True)), self.down).mul_(2)

    def _heads(self, qkv: Tensor, batch: int, length: int) -> list[Tensor]:
        if self.style == "stacked":  # section, head, width
            return list(qkv.view(batch, length, 3, 6, 4).permute(2, 0, 3, 1, 4).unbind(0))
        if self.style == "interleaved":  # head, section, width
            return list(qkv.view(batch, length, 6, 12).transpose(1, 2).chunk(3, dim=-1))
        if self.style == "sliced":
            keys = 24 + 4 * self.shared
            parts = [qkv[..., :24], qkv[..., 24:keys], qkv[..., keys:]]
        else:
            parts = list(qkv.split([24, 4 * self.shared, 4 * self.shared], dim=-1))
        heads = [part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts]
        return [h.unsqueeze(2).expand(-1, -1, 24 // (4 * h.shape[1]), -1, -1).flatten(1, 2) for h in heads]


@pytest.mark.parametrize(
    ("style", "shared", "members"),
    [("split", 6, 3), ("split", 2, 2), ("sliced", 2, 2), ("stacked", 6, 2), ("interleaved", 6, 6), ("merged", 6, 2)],
)
def test_ways_to_write_attention(style: str, shared: int, members: int) -> None:
    torch.manual_seed(0)
    pieces = cut(Styles(style, shared), Example(args=(torch.randn(1, 5, 8),)), name=style)
    assert {block.tensor.heads for block in pieces.graph.blocks if block.tensor} in ({shared, 12}, {shared})
    assert_members_equal_the_whole(pieces, Example(args=(torch.randn(3, 5, 8),)), members)
    slices = divide_blocks(
        pieces, member=0, members=members, blocks=range(len(pieces.blocks)), reduce=lambda x: x
    ).slices
    sections = (72,) if style == "interleaved" else (24, 4 * shared, 4 * shared)
    assert slices["qkv.bias"] == ParameterSlice(dim=0, sections=sections, member=0, members=members)
    assert (slices["up.weight"].dim, slices["down"].dim) == (0, 0) and slices["out.weight"].dim == 1


class Drops(fx.Interpreter):
    """Dropout as a function of the operation's name and of the element's place in the whole tensor."""

    def __init__(self, module: Any, random: dict[str, ParameterSlice]) -> None:
        super().__init__(module)
        self.random, self.dropped = random, 0

    def run_node(self, n: fx.Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        if n.target is torch.ops.aten.dropout.default:
            return args[0] * self.mask(n.name, args[0].shape)
        if n.target is torch.ops.aten.scaled_dot_product_attention.default:
            scores = (args[0] @ args[1].transpose(-1, -2) / math.sqrt(args[0].shape[-1])).softmax(-1)
            return scores * self.mask(n.name, scores.shape) @ args[2]
        return super().run_node(n)

    def mask(self, name: str, shape: torch.Size) -> Tensor:
        part = self.random.get(name)
        whole = list(shape)
        if part is not None:
            whole[part.dim] = sum(part.sections)
        generator = torch.Generator().manual_seed(sum(name.encode()))
        mask = torch.bernoulli(torch.full(whole, 0.8), generator=generator) / 0.8
        return mask if part is None else part.cut(mask)


@pytest.mark.parametrize("name", ["bert", "split"])
def test_the_part_of_random_numbers_is_told(name: str) -> None:
    torch.manual_seed(0)
    sizes = {"layers": 1, "width": 32, "heads": 4, "inner": 64, "longest": 16, "vocabulary": 50}
    model = Bert(Sizes(**sizes, dropout=0.2)) if name == "bert" else Styles(name, dropout=0.2)
    inputs = models.ids(3) if name == "bert" else torch.randn(3, 5, 8)
    pieces = cut(model, Example(args=(inputs[:1],)), name=name)
    own = members_of(pieces, Group(2))[1]
    assert len(own.random) == (1 if name == "bert" else 2)
    assert {part.dim for part in own.random.values()} == ({1} if name == "bert" else {1, 2})

    def run(own: MemberBlocks | None) -> Run:
        return lambda block, inputs: Drops(block, own.random if own else {}).run(*inputs)

    assert_members_equal_the_whole(pieces, Example(args=(inputs,)), 2, run=run)


def test_dropout_over_merged_batch_and_heads_is_not_promised() -> None:
    pieces = cut(Styles("merged", dropout=0.1), Example(args=(torch.randn(1, 5, 8),)), name="merged")
    named = {name for block in pieces.graph.blocks if block.tensor for name in block.tensor.parameters}
    assert named == {"up.weight", "down"}


def test_random_numbers_of_a_member_are_one_range() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = F.dropout(self.up(x), 0.1, training=True).chunk(2, dim=-1)
            return self.down(gate.sigmoid() * up)

    pieces = cut(Gated(), Example(args=(torch.randn(1, 8),)), name="gated")
    assert all(block.tensor is None for block in pieces.graph.blocks)


class Refused(nn.Module):
    """Two layers with something between that does not work on parts."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why
        self.up, self.down = nn.Linear(8, 12), nn.Linear(5 if why == "cut" else 12, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.why == "weight twice":
            up = self.up.weight.t()
            return self.down(x @ up) + (x @ up).sum(-1, keepdim=True)
        y = self.up(x)
        match self.why:
            case "softmax":
                y = y.softmax(-1)
            case "einsum":
                y = torch.einsum("bth,bth->bth", y, y)
            case "cut":
                y = y.view(-1, 5, 6, 2)[..., 1:, 1:].flatten(2)
            case "transposed":
                y = y.view(-1, 5, 4, 3).transpose(2, 3).flatten(2) + y
            case "table":
                y = y @ torch.eye(12)
        y = self.down(y)
        return y + self.up.bias.sum() if self.why == "bias twice" else y


REFUSALS = {
    "softmax": r"softmax \(softmax\), which normalises along the divided dimension",
    "einsum": r"einsum \(einsum\), which has no rule",
    "cut": r"slice \(slice_\d\), which takes sections apart",
    "transposed": r"add \(add\), which combines tensors that are divided in different ways",
    "table": r"matmul \(matmul\), which needs an operand divided",
    "weight twice": r"matmul \(matmul\), which shares up.weight with other operations",
    "bias twice": r"linear \(linear\), which shares up.bias with other operations",
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_is_not_proven_is_not_promised(why: str) -> None:
    model, example = Refused(why), Example(args=(torch.randn(1, 5, 8),))
    traced = trace(model, example)
    flow = flow_of(traced)
    (pair,) = find_pairs(traced, flow, linear_uses(traced, flow))
    with pytest.raises(ModelError, match=REFUSALS[why]):
        split_pair(traced, flow, pair)
    pieces = cut(model, example, name=why)
    assert all(block.tensor is None for block in pieces.graph.blocks)
    own = divide_blocks(pieces, member=1, members=2, blocks=range(len(pieces.blocks)), reduce=lambda x: x)
    assert own.blocks == pieces.blocks and not own.slices


class Drawn(nn.Module):
    """Two layers of 24 inside with a random chain of operations between; each keeps (batch, 3, 24)."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        self.up, self.down = nn.Linear(4, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for step in self.steps:
            y = self._step(step, y)
        return self.down(y)

    def _step(self, step: str, y: Tensor) -> Tensor:
        match step:
            case "swap halves":
                return torch.cat([y[..., 12:], y[..., :12]], -1)
            case "thirds":
                a, b, c = y.chunk(3, dim=-1)
                return torch.cat([a * b, c, b - c], dim=-1)
            case "uneven":
                a, b = y.split([8, 16], dim=-1)
                return torch.cat([b, a.relu()], -1)
            case "attention":
                q = y.unflatten(-1, (6, 4)).transpose(1, 2)
                return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
            case "heads inside":
                return y.view(y.shape[0], 3, 4, 6).permute(0, 1, 3, 2).reshape(y.shape[0], 3, 24)
            case "merged":
                heads = y.view(y.shape[0], 3, 2, 12).transpose(1, 2).reshape(-1, 3, 12)
                return (
                    (heads @ heads.transpose(1, 2)).softmax(-1).bmm(heads).view(-1, 2, 3, 12).transpose(1, 2).flatten(2)
                )
            case "table":
                return y * torch.arange(24.0)
            case _:
                return F.gelu(y) * y


drawn = st.lists(
    st.sampled_from(["swap halves", "thirds", "uneven", "attention", "heads inside", "merged", "table", "pointwise"]),
    max_size=4,
)


@settings(max_examples=6)
@given(steps=drawn)
def test_whatever_is_promised_works(steps: list[str]) -> None:
    torch.manual_seed(0)
    pieces = cut(Drawn(steps), Example(args=(torch.randn(1, 3, 4),)), name="drawn")
    (limit,) = {block.tensor.heads for block in pieces.graph.blocks if block.tensor} or {1}
    for members in (n for n in range(2, 9) if limit % n == 0):
        assert_members_equal_the_whole(pieces, Example(args=(torch.randn(2, 3, 4),)), members)


def test_a_residual_in_the_product_is_added_once() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Parameter(torch.randn(12, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(x.tanh(), F.gelu(self.up(x)), self.down)

    pieces = cut(Fused(), Example(args=(torch.randn(1, 8),)), name="fused")
    assert_members_equal_the_whole(pieces, Example(args=(torch.randn(3, 8),)), 2)


def test_errors() -> None:
    pieces = cut_family(FAMILIES["gpt"], False)
    blocks, same = range(len(pieces.blocks)), lambda x: x
    with pytest.raises(ModelError, match=r"attn.c_proj.weight and the layers .* Found 3 members for 4 equal parts"):
        divide_blocks(pieces, member=0, members=3, blocks=blocks, reduce=same)
    with pytest.raises(UsageError, match="member 2 of 2"):
        divide_blocks(pieces, member=2, members=2, blocks=blocks, reduce=same)
    chain = cut(models.chain(), Example(args=(torch.randn(2, 4),)), name="chain")
    with pytest.raises(ModelError, match="cut at its child modules"):
        divide_blocks(chain, member=0, members=2, blocks=[0], reduce=same)


sections_of = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@given(units=sections_of, members=st.integers(1, 4), dim=st.integers(0, 2))
def test_slices_cut_and_join(units: list[int], members: int, dim: int) -> None:
    sections = tuple(unit * members for unit in units)
    shape = [2, 3, 2]
    shape[dim] = sum(sections)
    whole = torch.arange(math.prod(shape)).view(shape)
    slices = [ParameterSlice(dim=dim, sections=sections, member=i, members=members) for i in range(members)]
    parts = [each.cut(whole) for each in slices]
    assert torch.equal(slices[0].join(parts), whole)
    for member, part in enumerate(parts):
        owned = [(colours(sections, members) == member).nonzero().flatten()]
        assert torch.equal(part, whole.index_select(dim, owned[0]))


def colours(sections: tuple[int, ...], members: int) -> Tensor:
    """Which member has each index of a divided dimension, one index after another."""
    return torch.tensor([index * members // size for size in sections for index in range(size)])


def coloured(shape: list[int], part: DividedTensor, members: int) -> Tensor:
    back = [1] * len(shape)
    back[part.dim] = -1
    return colours(part.sections, members).view(back).expand(shape)


@settings(max_examples=200)
@given(data=st.data(), units=sections_of, equal=st.booleans())
def test_reshaped_parts_are_the_same_elements(data: st.DataObject, units: list[int], equal: bool) -> None:
    """Against a tensor of which every element is marked with its member, and what lies where in each member's part."""
    members = 2
    sections = tuple(unit * members for unit in ([units[0]] * len(units) if equal else units))
    before, after = (data.draw(st.lists(st.integers(1, 3), max_size=2)) for _ in range(2))
    old, part = [*before, sum(sections), *after], DividedTensor(len(before), sections)
    new = data.draw(st.sampled_from(factorings(math.prod(old))))
    found = reshaped(part, old, new)
    marks = coloured(old, part, members).reshape(new)
    if found is None or any(size % members for size in found.sections):
        return
    assert torch.equal(marks, coloured(new, found, members))
    whole = torch.arange(math.prod(old))
    for member in range(members):
        one, two = (
            ParameterSlice(dim=p.dim, sections=p.sections, member=member, members=members) for p in (part, found)
        )
        assert torch.equal(one.cut(whole.view(old)).flatten(), two.cut(whole.view(new)).flatten())


@cache
def factorings(size: int) -> list[list[int]]:
    """Shapes of up to three dimensions, with ones."""
    of = [n for n in range(1, size + 1) if size % n == 0]
    return (
        [[a, b, size // a // b] for a in of for b in of if size % (a * b) == 0]
        + [[a, size // a] for a in of]
        + [[size]]
    )


@pytest.mark.parametrize("new", [[2, 3, 4], [6, 4], [24], [2, 12], [1, 6, 2, 2]])
def test_reshapes_that_keep_heads_are_found(new: list[int]) -> None:
    """(2, 3 heads, 4) in other shapes in which the heads can still be told apart."""
    found = reshaped(DividedTensor(1, (3,)), [2, 3, 4], new)
    assert found is not None and max(found.sections) % 3 == 0
