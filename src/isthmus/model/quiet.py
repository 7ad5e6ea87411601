"""Keeps a warning of torch from users whom it does not concern."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_weight_warnings"]


@contextmanager
def without_weight_warnings() -> Iterator[None]:
    """Silences what `torch.export` says of the list of weights that every `nn.RNN`, `nn.GRU` and `nn.LSTM` keeps.

    The list is torch's own, and only names parameters that the module has registered as it should.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The tensor attributes? .*\._flat_weights\[", UserWarning)
        yield
