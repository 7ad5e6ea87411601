"""Exported blocks as functions of their random keys, their tensors and their inputs.

Random operations of the graphs become functions of the keys (`random/dropout.py`, `random/attention_by_sample.py`), and
weights and buffers become arguments. So equal blocks have equal code, which `torch.compile` translates once, and no
mode has to watch every operation while a block runs. Several blocks that follow each other make one function, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from isthmus.model.trace import bound, kind_of
from isthmus.runtime.random.attention_by_sample import attention_by_sample
from isthmus.runtime.random.draws import Draw
from isthmus.runtime.random.dropout import hashed_dropout

__all__ = ["BlockFunction", "Link", "function_of"]

_BY_KEYS = ("dropout", "scaled_dot_product_attention")  # the random operations that become functions of keys


class Link(NamedTuple):
    """A block in a chain: its module, its random operations, and the names of its inputs and results."""

    module: nn.Module
    draws: Sequence[Draw]
    incoming: tuple[str, ...]
    outgoing: tuple[str, ...]

    @property
    def has_function(self) -> bool:
        """Return whether the block has a graph without modules in it, and its draws are functions of keys."""
        if not isinstance(self.module, fx.GraphModule) or any(draw.operation not in _BY_KEYS for draw in self.draws):
            return False
        return all(_is_plain(self.module, node) for node in self.module.graph.nodes)


@dataclass(frozen=True, eq=False)
class BlockFunction:
    """`compute(keys, *tensors, *inputs)` computes blocks; `text` is equal for those that compute the same.

    The inputs are those named `incoming`, and the results those named `outgoing`.
    """

    compute: Callable[..., Sequence[Any]]
    tensors: tuple[Tensor, ...]
    text: str
    incoming: tuple[str, ...]
    outgoing: tuple[str, ...]

    def __call__(self, keys: Tensor | None, *inputs: Any) -> Sequence[Any]:
        """Run the blocks; `keys` are those of their random operations, [operations, samples, 2]."""
        return self.compute(keys, *self.tensors, *inputs)


def function_of(chain: Sequence[Link], wanted: Collection[str] | None = None) -> BlockFunction | None:
    """Return blocks that follow each other as one function, or None if one of them has no function.

    Its results are those that are `wanted`; None: all of them.
    """
    if not all(link.has_function for link in chain):
        return None
    made = [name for link in chain for name in link.outgoing]
    incoming = dict.fromkeys(name for link in chain for name in link.incoming if name not in made)
    outgoing = tuple(name for name in dict.fromkeys(made) if wanted is None or name in wanted)
    writer = _Writer(incoming, chain)
    for link in chain:
        writer.add(link)
    writer.graph.output(tuple(writer.named[name] for name in outgoing))
    module = fx.GraphModule({}, writer.graph)
    return BlockFunction(module.forward, tuple(writer.tensors), module.code, tuple(incoming), outgoing)


def _is_plain(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node needs no module but for its tensors."""
    return node.op != "call_module" and (node.op != "get_attr" or isinstance(_content(module, node), Tensor))


def _content(module: fx.GraphModule, node: fx.Node) -> Any:
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


@dataclass
class _Writer:
    """Writes blocks into one graph; names of nodes follow from their places alone, so equal blocks read the same."""

    incoming: Collection[str]
    chain: Sequence[Link]
    graph: fx.Graph = field(default_factory=fx.Graph)
    tensors: list[Tensor] = field(default_factory=list)
    named: dict[str, fx.Node] = field(default_factory=dict)  # what passes between blocks
    draws: int = 0  # random operations so far

    def __post_init__(self) -> None:
        """Begin with the inputs: keys, tensors of all blocks, what comes from other blocks."""
        keys = self.graph.placeholder("keys")
        self._held: dict[int, fx.Node] = {}  # by id
        for link in self.chain:
            module = link.module
            assert isinstance(module, fx.GraphModule)
            for content in (_content(module, node) for node in module.graph.nodes if node.op == "get_attr"):
                if id(content) not in self._held:
                    self._held[id(content)] = self.graph.placeholder(f"tensor_{len(self.tensors)}")
                    self.tensors.append(content)
        for number, name in enumerate(self.incoming):
            self.named[name] = self.graph.placeholder(f"input_{number}")
        self._keys = self.graph.call_function(torch.unbind, (keys,)) if any(li.draws for li in self.chain) else None

    def add(self, link: Link) -> None:
        """Append a block."""
        module, draws = link.module, {draw.node: draw for draw in link.draws}
        assert isinstance(module, fx.GraphModule)
        inputs = iter(link.incoming)
        known: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node] = self.named[next(inputs)]
            elif node.op == "get_attr":
                known[node] = self._held[id(_content(module, node))]
            elif node.op == "output":
                results = fx.map_arg(node.args[0], known.__getitem__)
                self.named |= zip(link.outgoing, results, strict=True)
            elif node.name in draws:
                known[node] = self._drawn(node, draws[node.name], known)
            else:
                args, kwargs = (fx.map_arg(given, known.__getitem__) for given in (node.args, node.kwargs))
                known[node] = self.graph.create_node(node.op, node.target, args, kwargs)

    def _drawn(self, node: fx.Node, draw: Draw, known: dict[fx.Node, fx.Node]) -> fx.Node:
        """Append a random operation as a function of its keys."""
        own = self.graph.call_function(operator.getitem, (self._keys, self.draws))
        self.draws += 1
        given = fx.map_arg(bound(node.target, node.args, node.kwargs), known.__getitem__)
        if kind_of(node.target) == "dropout":
            named = {"p": given["p"], "dim": draw.dim, "split": draw.split}
            return self.graph.call_function(hashed_dropout, (given["input"], own), named)
        named = {
            "p": given["dropout_p"], "mask": given["attn_mask"], "causal": given["is_causal"],
            "scale": given["scale"], "gqa": given["enable_gqa"], "dim": draw.dim, "split": draw.split,
        }  # fmt: skip
        return self.graph.call_function(attention_by_sample, (given["query"], given["key"], given["value"], own), named)
