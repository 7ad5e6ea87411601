"""A model that has been built: the module, its input data, and the loss that training minimises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isthmus.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from isthmus.model.capture import Example

    Draw = Callable[[int, int], tuple[Example, Tensor | None]]
    Loss = Callable[[Any, Tensor], tuple[Tensor, Tensor]]

__all__ = ["BuiltModel"]


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A module on the device that was the default when it was built, with its data and loss.

    `draw(batch, seed)` gives synthetic inputs, and targets if they are known. `loss(output, target)` gives the sum of
    the losses and how many were summed, so that parts of a batch add up to the whole.
    """

    name: str
    module: nn.Module
    sequence: int | None
    draw: Draw
    loss: Loss

    def example(self, batch: int, *, seed: int = 0, device: torch.device | str | None = None) -> Example:
        """Return inputs of `batch` samples on `device`, or on the default device if none is given."""
        from isthmus.model.capture import Example

        drawn, _ = self.draw(batch, seed)
        return Example(
            args=tuple(_on(value, device) for value in drawn.args),
            kwargs={key: _on(value, device) for key, value in drawn.kwargs.items()},
        )

    def targets(self, batch: int, *, seed: int = 0, device: torch.device | str | None = None) -> Tensor:
        """Return the targets that belong to `example(batch, seed=seed)`."""
        _, target = self.draw(batch, seed)
        if target is None:
            raise ModelError(
                "There are no synthetic targets for this model",
                where=self.name,
                next="Name a data function in the job: data: package.module:function",
            )
        return _on(target, device)


def _on(value: Tensor, device: torch.device | str | None) -> Tensor:
    import torch

    return value.to(torch.get_default_device() if device is None else device)
