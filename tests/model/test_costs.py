"""FLOPs against torch's own counter, kept elements against autograd's hooks, on real and on random models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isthmus.model.capture import Example, capture
from isthmus.model.costs import _einsum
from isthmus.model.graph import BlockGraph

from . import models


class Odds(nn.Module):
    """Products that the other models lack: transposed convolutions, einsum, batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(4, 6, 4, stride=2)
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        z = torch.einsum("bcl,cd->bld", y, self.weight) @ torch.eye(5, device=x.device)
        rows = torch.addmm(self.bias, z.reshape(-1, 5), self.weight.t() @ self.weight)
        return torch.bmm(z, z.transpose(1, 2)).sum((1, 2)) + rows.view(z.shape).mean((1, 2))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "gpt": (models.Gpt, (models.ids(1),)),
    "resnet": (models.Resnet, (torch.zeros(1, 3, 16, 16),)),
    "odds": (Odds, (torch.zeros(1, 4, 9),)),
}


def counted(build: Callable[[], nn.Module], args: tuple[Tensor, ...], batch: int) -> tuple[float, float]:
    """Forward and both passes by torch's counter, attention as plain products."""
    model = build()
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH):
        inputs = [torch.zeros((batch, *a.shape[1:]), dtype=a.dtype) for a in args]
        with FlopCounterMode(display=False) as forward:
            output = model(*inputs)
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", CASES)
def test_flops_equal_torchs_counter(name: str) -> None:
    build, args = CASES[name]
    with torch.device("meta"):
        graph = capture(build(), Example(args=args), name=name)
    two, three = counted(build, args, 2), counted(build, args, 3)
    assert sum(b.forward_flops for b in graph.blocks) == three[0] - two[0]
    assert sum(b.backward_flops for b in graph.blocks) == three[1] - two[1]


def test_grouped_convolutions_by_hand() -> None:
    """torch's counter ignores the groups in the gradient of the weight, so this one is compared with a closed form."""
    net = nn.Sequential(nn.Conv1d(4, 8, 3, groups=2), nn.ReLU(), nn.ConvTranspose1d(8, 4, 2, groups=4))
    graph = graph_of(net, torch.randn(2, 4, 12))
    first, second = 2 * 8 * 10 * (4 // 2) * 3, 2 * 8 * 10 * (4 // 4) * 2
    assert sum(block.forward_flops for block in graph.blocks) == first + second
    assert sum(block.backward_flops for block in graph.blocks) == first + 2 * second


def kept(model: nn.Module, inputs: Tensor) -> float:
    """Elements of four bytes that autograd keeps, by memory, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            alive.append(tensor)  # so that no memory is used twice
            sizes[memory.data_ptr()] = memory.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs)
    return sum(sizes.values()) / 4


def graph_of(model: nn.Module, inputs: Tensor) -> BlockGraph:
    return capture(model, Example(args=(inputs,)), name="m")


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        pytest.param(models.Gpt(3), models.ids(8), id="gpt"),
        pytest.param(models.Bert(), models.ids(8), id="bert"),
        pytest.param(models.Resnet(), torch.randn(8, 3, 16, 16), id="resnet"),
        pytest.param(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(8, 8), id="mlp"),
    ],
)
def test_kept_elements_are_autograds(model: nn.Module, inputs: Tensor) -> None:
    slope = (kept(model, inputs) - kept(model, inputs[:4].clone())) / 4
    assert sum(block.saved for block in graph_of(model, inputs).blocks) == pytest.approx(slope, rel=0.15)


def test_the_first_layer_needs_no_gradient_of_its_input() -> None:
    graph = graph_of(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(2, 8))
    assert sum(block.forward_flops for block in graph.blocks) == 2 * 2 * 8 * 8
    assert sum(block.backward_flops for block in graph.blocks) == (1 + 2) * 2 * 8 * 8


def test_dropout_keeps_a_byte_per_element() -> None:
    kept_by = [
        sum(block.saved for block in graph_of(models.Gpt(1, dropout=p), models.ids(2)).blocks) for p in (0.0, 0.1)
    ]
    assert kept_by[1] - kept_by[0] == 16 * 32 / 4


class Reductions(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(8, 8), nn.Linear(8, 8), how

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.b(torch.relu(self.a(x)))
        if self.how == "softmax":
            return F.softmax(y, dim=0)
        return F.cross_entropy(y, target, reduction=self.how)


@pytest.mark.parametrize(
    ("how", "mixing"),
    [
        ("sum", ["cross_entropy_loss"]),  # the model's output is one number of all samples
        ("none", []),
        ("mean", ["cross_entropy_loss"]),
        ("softmax", ["softmax"]),
    ],
)
def test_operations_over_the_batch_are_named(how: str, mixing: list[str]) -> None:
    example = Example(args=(torch.randn(2, 8), torch.zeros(2, dtype=torch.long)))
    blocks = capture(Reductions(how), example, name="m").blocks
    found = [told for block in blocks for told in block.mixes_samples]
    assert [told.partition(" ")[0] for told in found] == mixing
    assert all("of test_costs.py: return F." in told for told in found)


def test_moved_counts_inputs_results_and_weights_once() -> None:
    (block,) = graph_of(nn.Linear(8, 4), torch.randn(2, 8)).blocks
    assert (block.moved, block.weights_moved, block.operations) == (8 + 4, 8 * 4 + 4, 1)
    assert block.saved == 8


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhij,bhjk->bhik", ((2, 3, 4, 5), (2, 3, 5, 6))),
        ("...ij,...jk->...ik", ((2, 3, 4, 5), (2, 3, 5, 6))),
        ("b...i,ij->b...j", ((2, 3, 4, 5), (5, 7))),
        ("...i,...i->...", ((2, 1, 5), (4, 5))),
    ],
)
def test_dots_in_einsum_stand_for_the_dimensions_between(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        torch.einsum(equation, *map(torch.zeros, shapes))
    assert _einsum([equation, list(shapes)], ()) == counter.get_total_flops()
