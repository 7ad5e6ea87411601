"""Models whose code misbehaves."""

from torch import nn

print("imported with noise")


def noisy() -> nn.Module:
    print("built with noise")
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def interrupted() -> nn.Module:
    raise KeyboardInterrupt


def broken() -> nn.Module:
    raise ZeroDivisionError("no model today")
