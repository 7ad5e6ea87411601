"""Inception-v3 for 299 × 299 images of 1000 classes. Szegedy et al. 2016, laid out as in torchvision.

The auxiliary classifier, which only helps training, is left out: 23,834,568 parameters (27,161,264 with it).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, images

__all__ = ["Inception", "inception"]

_SIZE = 299
_CLASSES = 1000
Pair = tuple[int, int]


class Convolution(nn.Module):
    """A convolution, batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int | Pair, stride: int = 1, padding: int | Pair = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(norm(conv(x)))."""
        return F.relu(self.bn(self.conv(x)))


def _row(inputs: int, outputs: int, length: int = 7) -> Convolution:
    return Convolution(inputs, outputs, (1, length), padding=(0, length // 2))


def _column(inputs: int, outputs: int, length: int = 7) -> Convolution:
    return Convolution(inputs, outputs, (length, 1), padding=(length // 2, 0))


class Branches(nn.Module):
    """Branches side by side, whose channels are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated results of the branches, [batch, sum of the branches' outputs, height, width]."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    """Return a branch that projects the mean of 3 × 3 neighbours."""
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Convolution(inputs, outputs, 1))


def _mixed_35(inputs: int, pooled: int) -> Branches:
    """Return branches of 1 × 1, 5 × 5 and two 3 × 3 convolutions at 35 × 35."""
    double = [Convolution(inputs, 64, 1), Convolution(64, 96, 3, padding=1), Convolution(96, 96, 3, padding=1)]
    return Branches(
        Convolution(inputs, 64, 1),
        nn.Sequential(Convolution(inputs, 48, 1), Convolution(48, 64, 5, padding=2)),
        nn.Sequential(*double),
        _pooled(inputs, pooled),
    )


def _halved_35(inputs: int) -> Branches:
    """Return branches that take 35 × 35 to 17 × 17."""
    double = [Convolution(inputs, 64, 1), Convolution(64, 96, 3, padding=1), Convolution(96, 96, 3, stride=2)]
    return Branches(Convolution(inputs, 384, 3, stride=2), nn.Sequential(*double), nn.MaxPool2d(3, stride=2))


def _mixed_17(inputs: int, inner: int) -> Branches:
    """Return branches of 7 × 7 convolutions, made as pairs of 1 × 7 and 7 × 1, at 17 × 17."""
    single = [Convolution(inputs, inner, 1), _row(inner, inner), _column(inner, 192)]
    double = [_column(inner, inner), _row(inner, inner), _column(inner, inner), _row(inner, 192)]
    return Branches(
        Convolution(inputs, 192, 1),
        nn.Sequential(*single),
        nn.Sequential(Convolution(inputs, inner, 1), *double),
        _pooled(inputs, 192),
    )


def _halved_17(inputs: int) -> Branches:
    """Return branches that take 17 × 17 to 8 × 8."""
    long = [Convolution(inputs, 192, 1), _row(192, 192), _column(192, 192), Convolution(192, 192, 3, stride=2)]
    short = [Convolution(inputs, 192, 1), Convolution(192, 320, 3, stride=2)]
    return Branches(nn.Sequential(*short), nn.Sequential(*long), nn.MaxPool2d(3, stride=2))


def _mixed_8(inputs: int) -> Branches:
    """Return branches that end in a fork of 1 × 3 and 3 × 1, at 8 × 8."""
    double = [Convolution(inputs, 448, 1), Convolution(448, 384, 3, padding=1)]
    return Branches(
        Convolution(inputs, 320, 1),
        nn.Sequential(Convolution(inputs, 384, 1), Branches(_row(384, 384, 3), _column(384, 384, 3))),
        nn.Sequential(*double, Branches(_row(384, 384, 3), _column(384, 384, 3))),
        _pooled(inputs, 192),
    )


class Inception(nn.Module):
    """A stem of convolutions, eleven mixed parts and one linear layer."""

    def __init__(self, *, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Convolution(3, 32, 3, stride=2),
            Convolution(32, 32, 3),
            Convolution(32, 64, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            Convolution(64, 80, 1),
            Convolution(80, 192, 3),
            nn.MaxPool2d(3, stride=2),
        )
        at_35 = [_mixed_35(192, 32), _mixed_35(256, 64), _mixed_35(288, 64)]
        at_17 = [_mixed_17(768, inner) for inner in (128, 160, 160, 192)]
        self.mixed = nn.Sequential(*at_35, _halved_35(288), *at_17, _halved_17(768), _mixed_8(1280), _mixed_8(2048))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(2048, classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images [batch, 3, height, width], [batch, classes]."""
        out: Tensor = self.fc(self.dropout(self.mixed(self.stem(x)).mean(dim=(2, 3))))
        return out


def inception(*, name: str, sequence: None) -> BuiltModel:
    """Build an Inception-v3 that classifies images."""
    draw = partial(images, size=_SIZE, classes=_CLASSES)
    return BuiltModel(name=name, module=Inception(classes=_CLASSES), sequence=sequence, draw=draw, loss=cross_entropy)
