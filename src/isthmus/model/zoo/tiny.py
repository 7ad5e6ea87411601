"""Models that train on a laptop in seconds."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, images, vectors

__all__ = ["CNN", "MLP", "cnn", "mlp"]


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, *, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        widths = (features, *[width] * (layers - 1), classes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of vectors [batch, features], [batch, classes]."""
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        out: Tensor = self.layers[-1](x)
        return out


class ConvolutionNorm(nn.Sequential):
    """A 3 × 3 convolution, batch norm and ReLU; `stride` 2 halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class CNN(nn.Module):
    """Convolutions with batch norm, the mean over the image, and one linear layer."""

    def __init__(self, *, channels: tuple[int, ...], classes: int) -> None:
        super().__init__()
        pairs = zip((3, *channels[:-1]), channels, strict=True)
        self.features = nn.Sequential(*(ConvolutionNorm(a, b, 1 if a == 3 else 2) for a, b in pairs))
        self.classifier = nn.Linear(channels[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images [batch, 3, height, width], [batch, classes]."""
        out: Tensor = self.classifier(self.features(x).mean(dim=(2, 3)))
        return out


def mlp(*, name: str, sequence: None, features: int, width: int, layers: int, classes: int = 10) -> BuiltModel:
    """Build an MLP that classifies vectors."""
    module = MLP(features=features, width=width, layers=layers, classes=classes)
    draw = partial(vectors, features=features, classes=classes)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)


def cnn(*, name: str, sequence: None, size: int, channels: tuple[int, ...], classes: int = 10) -> BuiltModel:
    """Build a CNN that classifies small images."""
    module = CNN(channels=channels, classes=classes)
    draw = partial(images, size=size, classes=classes)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
