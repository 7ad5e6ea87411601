"""Small things to train: each structure that a plan may meet, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from isthmus.model.torch_export import Example
from isthmus.model.zoo.gpt import GPT
from isthmus.model.zoo.synthetic import cross_entropy
from tests.runtime.world import Cutting, Task

__all__ = ["TASKS", "Chain", "Layer", "pieces_of", "seeded", "vectors"]


class Layer(nn.Module):
    """A residual layer of two products."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))
        return out


class Chain(nn.Module):
    """Blocks `inp`, `h.0` .. `h.5`, `out`."""

    def __init__(self, dropout: float = 0.0, layers: int = 6, width: int = 16) -> None:
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.h = nn.ModuleList(Layer(width, dropout) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.h:
            x = layer(x)
        out: Tensor = self.out(self.norm(x))
        return out


class Branches(nn.Module):
    """Two branches of different length, a skip over them, and a tensor that has no samples."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.table = nn.Parameter(torch.linspace(-1, 1, width))
        self.left = nn.ModuleList(Layer(width) for _ in range(2))
        self.right = nn.ModuleList(Layer(width) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        shift = torch.tanh(self.table * 2)
        a, b = x, x + shift
        for layer in self.left:
            a = layer(a)
        for layer in self.right:
            b = layer(b) * shift
        out: Tensor = self.out(self.norm(x + a * b + shift))
        return out


class Normed(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.b, self.nb = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.c, self.nc = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x)))
        x = torch.relu(self.nb(self.b(x)))
        x = torch.relu(self.nc(self.c(x)))
        out: Tensor = self.out(x.mean((2, 3)))
        return out


class Wilful(nn.Module):
    """A chain of children that will not be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(_Wilful(8 if i == 0 else 16) for i in range(4)), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class _Wilful(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, 16)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            raise RuntimeError("not for export")
        return torch.tanh(self.inner(x))


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(7)
        return make()

    return made


def vectors(shape: tuple[int, ...]) -> Callable[[Sequence[int]], tuple[Example, Tensor]]:
    def get(numbers: Sequence[int]) -> tuple[Example, Tensor]:
        sources = [torch.Generator().manual_seed(number) for number in numbers]
        inputs = torch.stack([torch.randn(shape, generator=source) for source in sources])
        targets = torch.stack([torch.randint(5, (), generator=source) for source in sources])
        return Example(args=(inputs,), kwargs={}), targets

    return get


def _tokens(numbers: Sequence[int]) -> tuple[Example, Tensor]:
    """Sequences whose targets are partly ignored: counts differ from sample to sample."""
    sources = [torch.Generator().manual_seed(number) for number in numbers]
    tokens = torch.stack([torch.randint(40, (9,), generator=source) for source in sources])
    targets = tokens[:, 1:].clone()
    for row, number in enumerate(numbers):
        targets[row, : number % 4] = -100
    return Example(args=(tokens[:, :-1].contiguous(),), kwargs={}), targets


def _gpt(dropout: float = 0.0) -> nn.Module:
    return GPT(layers=3, width=16, heads=4, longest=8, vocabulary=40, dropout=dropout)


TASKS = {
    "chain": Task(seeded(Chain), vectors((8,)), cross_entropy),
    "dropout": Task(seeded(lambda: Chain(dropout=0.3)), vectors((8,)), cross_entropy),
    "branches": Task(seeded(Branches), vectors((8,)), cross_entropy),
    "normed": Task(seeded(Normed), vectors((2, 6, 6)), cross_entropy),
    "wilful": Task(seeded(Wilful), vectors((8,)), cross_entropy),
    "gpt": Task(seeded(_gpt), _tokens, cross_entropy),
    "gpt-dropout": Task(seeded(lambda: _gpt(0.2)), _tokens, cross_entropy),
}


@cache
def pieces_of(name: str, precision: str = "fp32") -> Cutting:
    return TASKS[name].pieces(precision)
