"""VGG-19, ResNet-101 and Wide ResNet-101-2 for 224 × 224 images of 1000 classes.

VGG is that of Simonyan and Zisserman 2015. ResNet is that of He et al. 2016, with the stride on the 3 × 3 convolution,
as is usual today. Wide ResNet is that of Zagoruyko and Komodakis 2016: its 3 × 3 convolutions are twice as wide.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, images

__all__ = ["VGG", "ResNet", "resnet", "vgg"]

_SIZE = 224
_CLASSES = 1000


class VGG(nn.Module):
    """Runs of 3 × 3 convolutions, each run ended by a pooling that halves the image; then three linear layers."""

    def __init__(self, *, convolutions: tuple[int, ...], width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(*_convolutions(convolutions))
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, classes),
        )
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images [batch, 3, height, width], [batch, classes]."""
        out: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return out


def _convolutions(runs: tuple[int, ...]) -> list[nn.Module]:
    """Return the layers of the runs; `runs` counts the convolutions of each.

    They have 64, 128, 256, 512 and 512 channels.
    """
    layers: list[nn.Module] = []
    inputs = 3
    for count, outputs in zip(runs, (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2, 2))
    return layers


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions, added to the (possibly projected) input."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the result for x [batch, inputs, height, width], [batch, outputs, height / stride, width / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """A wide first convolution, four runs of bottlenecks, and one linear layer."""

    def __init__(self, *, bottlenecks: tuple[int, int, int, int], classes: int, widening: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _bottlenecks(64, 64 * widening, 256, bottlenecks[0], stride=1)
        self.layer2 = _bottlenecks(256, 128 * widening, 512, bottlenecks[1], stride=2)
        self.layer3 = _bottlenecks(512, 256 * widening, 1024, bottlenecks[2], stride=2)
        self.layer4 = _bottlenecks(1024, 512 * widening, 2048, bottlenecks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2048, classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images [batch, 3, height, width], [batch, classes]."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


def _bottlenecks(inputs: int, inner: int, outputs: int, count: int, *, stride: int) -> nn.Sequential:
    first = Bottleneck(inputs, inner, outputs, stride)
    return nn.Sequential(first, *(Bottleneck(outputs, inner, outputs, 1) for _ in range(count - 1)))


def _initialise(model: nn.Module) -> None:
    """Initialise convolutions by He's rule, from their number of outputs; the rest stays as torch initialises it."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def vgg(*, name: str, sequence: None, convolutions: tuple[int, ...], dropout: float = 0.5) -> BuiltModel:
    """Build a VGG that classifies images."""
    module = VGG(convolutions=convolutions, width=4096, classes=_CLASSES, dropout=dropout)
    draw = partial(images, size=_SIZE, classes=_CLASSES)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)


def resnet(*, name: str, sequence: None, bottlenecks: tuple[int, int, int, int], widening: int = 1) -> BuiltModel:
    """Build a ResNet that classifies images."""
    module = ResNet(bottlenecks=bottlenecks, classes=_CLASSES, widening=widening)
    draw = partial(images, size=_SIZE, classes=_CLASSES)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
