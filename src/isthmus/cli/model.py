"""The command `isthmus model show MODEL`."""

from __future__ import annotations

import argparse
from typing import Any

from isthmus.cli.console import Answer, ProgressLine, check_folder
from isthmus.model import source
from isthmus.model.graph import Block, BlockGraph
from isthmus.report.model_text import model_text, state_sizes, tensor_split

__all__ = ["run"]


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Return what a model costs, block by block, and save its graph if asked."""
    kind = source.parse(args.model)
    check_folder(args.save)
    captured: list[bool] = []
    progress.phase(f"Reading {args.model}")
    graph = source.load_graph(args.model, sequence=args.sequence, capturing=lambda: captured.append(True))
    origin = "file" if isinstance(kind, source.SavedModel) else "captured" if captured else "cache"
    if args.save:
        source.save_graph(graph, args.save)
    values = {**_values(graph), "origin": origin, "file": args.save}
    return Answer(values=values, text="\n".join([model_text(graph, origin), *_saved(args.save)]))


def _saved(path: str | None) -> list[str]:
    return [f"\nwritten to {path}"] if path else []


def _values(graph: BlockGraph) -> dict[str, Any]:
    split = tensor_split(graph)
    return {
        "name": graph.name,
        "parameters": graph.elements,
        "flops_per_sample": graph.flops,
        "bytes": state_sizes(graph),
        "sequence": graph.sequence,
        "how": graph.how,
        "digest": graph.digest,
        "buffers": graph.buffers,
        "tensor_split": {"flops": split.flops, "parameters": split.parameters, "degree": split.degree},
        "ties": {parameter.name: list(parameter.ties) for parameter in graph.parameters if parameter.ties},
        "mixes_samples": {block.name: list(block.mixes_samples) for block in graph.blocks if block.mixes_samples},
        "blocks": [_block(graph, block) for block in graph.blocks],
    }


def _block(graph: BlockGraph, block: Block) -> dict[str, Any]:
    return {
        "name": block.name,
        "digest": block.digest,
        "parameters": sum(graph.parameter[name].elements for name in block.parameters),
        "forward_flops": block.forward_flops,
        "backward_flops": block.backward_flops,
        "saved_elements": block.saved,
    }
