"""Vision Transformer: an encoder over the patches of an image. Dosovitskiy et al. 2021.

ViT-L/16 for 224 × 224 images and 1000 classes has 304,326,632 parameters. Dropout is 0.1, as in the paper's training on
ImageNet: after the embedding and after every linear layer except the queries, keys and values.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, images

__all__ = ["ViT", "vit"]

_EPSILON = 1e-6


class Patches(nn.Module):
    """Cuts an image into square patches and projects each."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, image: Tensor) -> Tensor:
        """Return the projected patches of images [batch, 3, height, width], [batch, patches, width]."""
        out: Tensor = self.projection(image).flatten(2).transpose(1, 2)
        return out


class VitEmbeddings(nn.Module):
    """A trained token in front of the patches, and a trained position for each of them."""

    def __init__(self, width: int, size: int, patch: int, dropout: float) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.patch_embeddings = Patches(width, patch)
        self.dropout = nn.Dropout(dropout)

    def forward(self, image: Tensor) -> Tensor:
        """Return the embeddings of images [batch, 3, height, width], [batch, 1 + patches, width]."""
        patches = self.patch_embeddings(image)
        first = self.cls_token.expand(patches.shape[0], -1, -1)
        out: Tensor = self.dropout(torch.cat((first, patches), dim=1) + self.position_embeddings)
        return out


class VitAttention(nn.Module):
    """Self-attention in which every position attends to every other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values, [batch, positions, width] like the input."""
        batch, positions, width = x.shape
        q, k, v = (
            projection(x).view(batch, positions, self.heads, width // self.heads).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, positions, width)
        out: Tensor = self.o_proj(y)
        return out


class VitMLP(nn.Module):
    """Two linear layers with GELU between them; the inner width is four times the outer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the MLP, [batch, positions, width] like the input."""
        out: Tensor = self.fc2(self.dropout(F.gelu(self.fc1(x))))
        return out


class VitLayer(nn.Module):
    """Attention and an MLP, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = VitAttention(width, heads)
        self.layernorm_before = nn.LayerNorm(width, eps=_EPSILON)
        self.layernorm_after = nn.LayerNorm(width, eps=_EPSILON)
        self.mlp = VitMLP(width, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer, [batch, positions, width] like the input."""
        x = x + self.dropout(self.attention(self.layernorm_before(x)))
        out: Tensor = x + self.dropout(self.mlp(self.layernorm_after(x)))
        return out


class VitTrunk(nn.Module):
    """The embeddings, the layers and the last norm."""

    def __init__(self, embeddings: VitEmbeddings, layers: list[VitLayer], width: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)
        self.layernorm = nn.LayerNorm(width, eps=_EPSILON)

    def forward(self, image: Tensor) -> Tensor:
        """Return the hidden states of images [batch, 3, height, width], [batch, 1 + patches, width]."""
        x: Tensor = self.embeddings(image)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.layernorm(x)
        return out


class ViT(nn.Module):
    """Maps images [batch, 3, size, size] to logits [batch, classes], which are computed from the token in front."""

    def __init__(
        self, *, layers: int, width: int, heads: int, size: int, patch: int, classes: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        parts = [VitLayer(width, heads, dropout) for _ in range(layers)]
        self.vit = VitTrunk(VitEmbeddings(width, size, patch, dropout), parts, width)
        self.classifier = nn.Linear(width, classes)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and not name.endswith("cls_token"):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits of the classes, [batch, classes]."""
        out: Tensor = self.classifier(self.vit(image)[:, 0])
        return out


def vit(*, name: str, sequence: None, size: int, classes: int = 1000, **sizes: int) -> BuiltModel:
    """Build a Vision Transformer that classifies images."""
    module = ViT(size=size, classes=classes, **sizes)
    draw = partial(images, size=size, classes=classes)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
