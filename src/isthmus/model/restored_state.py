"""Runs a module and afterwards puts back whatever its forward changed.

A forward may count its calls, remember its last result or fill a buffer. Capturing, measuring and checking call it more
often than training does, and some of these calls have no real data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["kept_state", "state_of"]


@contextmanager
def kept_state(*modules: nn.Module, weights: bool = False) -> Iterator[None]:
    """Let the modules run inside this context, and put back what they held: attributes, buffers and other tensors.

    With `weights`, the contents of parameters are put back too. What is kept in objects that are no containers is not
    seen.
    """
    back = state_of(*modules, weights=weights)
    try:
        yield
    finally:
        back()


def state_of(*modules: nn.Module, weights: bool = False) -> Callable[[], None]:
    """Note what modules hold, and return a function that puts it back as often as it is called."""
    notes: dict[int, Callable[[], None]] = {}
    for module in modules:
        _note(module, notes, weights)
    steps = list(notes.values())

    def back() -> None:
        for step in steps:
            step()

    return back


def _note(content: Any, notes: dict[int, Callable[[], None]], weights: bool) -> None:
    if isinstance(content, nn.Module):
        content = vars(content)
    if id(content) in notes:
        return
    if isinstance(content, Tensor):
        if weights or not isinstance(content, nn.Parameter):
            notes[id(content)] = _tensor(content)
    elif isinstance(content, (dict, list, set, deque)):
        notes[id(content)] = _container(content)
        inside: Iterable[Any] = content.values() if isinstance(content, dict) else content
        for one in inside:
            _note(one, notes, weights)


def _tensor(tensor: Tensor) -> Callable[[], None]:
    content = tensor.detach().clone()

    def back() -> None:
        tensor.data.copy_(content)  # not seen by autograd, which would take it for a change of what it saved

    return back


def _container(content: Any) -> Callable[[], None]:
    items = content.copy()

    def back() -> None:
        content.clear()
        (content.extend if isinstance(content, (list, deque)) else content.update)(items)

    return back
