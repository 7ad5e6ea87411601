"""The hash of a block graph, by which a plan knows the model that it was made for."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec.structs import replace

from isthmus.model.graph import NORMS, BlockGraph

__all__ = ["digest_of"]

_decode = msgspec.json.Decoder(BlockGraph).decode


def digest_of(graph: BlockGraph) -> str:
    """Return the sha256, in hex, of the graph's JSON with `name` and `digest` left empty.

    Operations that are not proven to keep samples apart are left out too: they are described by a line of code, which
    may move. The JSON is decoded and encoded once more, so that 3 and 3.0 in a field of floats hash alike, as they do
    after a file was written and read.
    """
    blocks = tuple(replace(b, mixes_samples=tuple(m for m in b.mixes_samples if m in NORMS)) for b in graph.blocks)
    bare = replace(graph, name="", digest="", blocks=blocks)
    plain = msgspec.to_builtins(_decode(msgspec.json.encode(bare)))
    del plain["unreached"]  # it follows from the rest, and older digests are without it
    return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()
