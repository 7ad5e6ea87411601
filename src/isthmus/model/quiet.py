"""Silences a warning of torch that does not concern users."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_weight_warnings"]


@contextmanager
def without_weight_warnings() -> Iterator[None]:
    """Silence what `torch.export` says about the list of weights that every `nn.RNN`, `nn.GRU` and `nn.LSTM` keeps.

    The list is torch's own, and only names parameters that the module has registered as it should.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The tensor attributes? .*\._flat_weights\[", UserWarning)
        yield
