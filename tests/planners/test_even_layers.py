"""What Megatron's even cut counts as layers."""

from __future__ import annotations

from msgspec.structs import replace

from isthmus.plan.types import Pipeline
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.schemes.grid import megatron_plan
from isthmus.planners.schemes.staged_ideas import even_layers
from tests.plan.small_models import chain
from tests.planners.test_portfolio import problem, two_regions


def test_a_last_layer_with_the_last_norm_in_it_counts() -> None:
    """Its digest is its own, its work is that of the others."""
    graph = chain(10)
    *others, last, head = graph.blocks
    graph = replace(graph, blocks=(*others, replace(last, digest="with the last norm"), head))
    task = problem(two_regions(), graph)
    assert (even_layers(task)[1:-1] == graph.blocks[1].forward_flops).all()
    (pipeline,) = megatron_plan(task, Fix(pp=2, dp=1, tp=1, micro=1)).parts
    assert isinstance(pipeline, Pipeline)
    assert [stage.first for stage in pipeline.stages] == ["embed", "h.5"]
