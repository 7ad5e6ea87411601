"""RoBERTa: BERT's trunk, trained longer on more text, with a vocabulary and a head of its own. Liu et al. 2019.

Positions are counted from 2 and there is one kind of segment; the large model has 355,412,057 parameters.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.bert import BertTrunk, Sizes, initialise
from isthmus.model.zoo.synthetic import cross_entropy, masked_tokens

__all__ = ["Roberta", "roberta"]


class RobertaHead(nn.Module):
    """A linear layer, GELU and a norm, then the logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dense = nn.Linear(sizes.width, sizes.width)
        self.layer_norm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.decoder = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of hidden states [batch, sequence, width], [batch, sequence, vocabulary]."""
        out: Tensor = self.decoder(self.layer_norm(F.gelu(self.dense(x))))
        return out


class Roberta(nn.Module):
    """Maps token numbers [batch, sequence] to logits [batch, sequence, vocabulary]; the head shares the embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.roberta = BertTrunk(sizes)
        self.lm_head = RobertaHead(sizes)
        self.lm_head.decoder.weight = self.roberta.embeddings.word_embeddings.weight
        initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token at each position, [batch, sequence, vocabulary]."""
        out: Tensor = self.lm_head(self.roberta(tokens))
        return out


def roberta(*, name: str, sequence: int, vocabulary: int = 50265, **sizes: int) -> BuiltModel:
    """Build a RoBERTa with masked-token prediction; the mask is the last token of its vocabulary."""
    module = Roberta(Sizes(vocabulary=vocabulary, segments=1, offset=2, epsilon=1e-5, **sizes))
    draw = partial(masked_tokens, vocabulary=vocabulary, sequence=sequence, mask=vocabulary - 1)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
