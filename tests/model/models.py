"""Small models for tests: each family of structure once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))


class Layer(nn.Module):
    """Pre-norm where causal (GPT), else post-norm (BERT)."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(width, heads, causal=causal), Mlp(width, dropout)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


class Gpt(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32, dropout: float = 0.0, *, causal: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, width), nn.Embedding(16, width)
        self.h = nn.ModuleList([Layer(width, 4, causal=causal, dropout=dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.h:
            x = layer(x)
        return self.head(self.ln_f(x))


class Bert(Gpt):
    def __init__(self) -> None:
        super().__init__(causal=False)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.down(x)
        return self.relu(y)


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.layers = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.fc = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(self.layers(self.stem(image)).mean((2, 3)))


class Decoder(nn.Module):
    """An encoder-decoder by torch's own transformer, with a mask that every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.transformer = nn.Transformer(32, 4, 1, 2, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(32, 50)

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        length = target.shape[1]
        mask = torch.full((length, length), float("-inf"), device=target.device).triu(1)
        memory = self.transformer.encoder(self.embed(source))
        decoded = self.transformer.decoder(self.embed(target), memory, mask, tgt_is_causal=True)
        return {"logits": self.out(decoded), "memory": memory}


class Towers(nn.Module):
    """Branches side by side whose operations are called in turns."""

    def __init__(self, towers: int = 3, depth: int = 4) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(depth)) for _ in range(towers)
        )
        self.out = nn.Linear(8 * towers, 4)

    def forward(self, x: Tensor) -> Tensor:
        values = [x] * len(self.towers)
        for depth in range(len(self.towers[0])):
            values = [
                torch.relu(tower[depth](value))
                for tower, value in zip(self.towers, values, strict=True)  # type: ignore[index]
            ]
        return self.out(torch.cat([value.mean(2) for value in values], dim=1))


class FixedBatch(nn.Module):
    """Takes the batch as a plain number, which export then bakes in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).view(int(x.shape[0]) * 2, 4)
        return self.c(self.b(y)).view(int(x.shape[0]), 8)


class PerSample(nn.Module):
    """Loops over the samples: its graph grows with the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in x])


def chain() -> nn.Module:
    """Children in sequence, one of which export cannot follow."""
    return nn.Sequential(nn.Linear(4, 8), PerSample(), nn.BatchNorm1d(8), nn.Linear(8, 3))


class PerSampleWhole(nn.Module):
    """Loops over the samples, and its children form no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.stack([self.a(row) for row in x])
        return self.b(torch.relu(y)), y


def ids(batch: int, *, length: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(seed))
