"""Whatever the plan, the same losses and the same weights as one process."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.model.job import Optimizer
from isthmus.plan.types import Plan, Replica, Stage, Sync
from tests.runtime.tasks import TASKS, pieces_of
from tests.runtime.world import assert_same, pipeline_plan, reference, small_cluster, train

CLUSTER = small_cluster()
DEVICES = {letter: f"h{i // 4}/CPU/{i % 4}" for i, letter in enumerate("abcdefgh")}  # a to d on one host
SGD = Optimizer(name="sgd", learning_rate=0.2, momentum=0.9, weight_decay=0.01)
ADAMW = Optimizer(learning_rate=1e-2, weight_decay=0.1)


def stage(text: str, **state: Any) -> Stage:
    """`0-2 a4 b3/3`: blocks 0 to 2, four samples on a, three on b in three slices; `ab4` is a tensor group of two."""
    blocks, *replicas = text.split()
    first, last = blocks.split("-")
    return Stage(first=first, last=last, replicas=tuple(_replica(each) for each in replicas), **state)


def _replica(text: str) -> Replica:
    letters = text.rstrip("0123456789/")
    share, _, slices = text[len(letters) :].partition("/")
    return Replica(devices=tuple(DEVICES[letter] for letter in letters), share=int(share), slices=int(slices or 1))


def sync(text: str, **others: Any) -> Sync:
    """`ring 0-2 abc`: blocks 0 to 2 among a, b and c."""
    how, blocks, participants = text.split()
    names = tuple(blocks.split(","))
    root = others.pop("root", None)
    return Sync(
        bucket=f"{how} {blocks}",
        how=how,  # type: ignore[arg-type]
        parameters=names,
        participants=tuple(DEVICES[letter] for letter in participants),
        root=DEVICES[root] if root else None,
        **others,
    )


def named(task: str, stages: list[Stage], syncs: list[Sync], precision: str = "fp32", **others: Any) -> Plan:
    """Block numbers become names; `3-5` in a sync is all parameters of those blocks."""
    pieces = pieces_of(task, precision)
    names = [block.name for block in pieces.graph.blocks]

    def block(text: str) -> str:
        return names[int(text) % len(names) if text != "z" else -1]

    def parameters(word: str) -> tuple[str, ...]:
        if not word[0].isdigit():
            return (word,)
        first, _, last = word.partition("-")
        end = len(names) - 1 if last == "z" else int(last or first)
        return tuple(f"[{name}]" for name in names[int(first) : end + 1])

    import msgspec

    return pipeline_plan(
        pieces,
        [msgspec.structs.replace(s, first=block(s.first), last=block(s.last)) for s in stages],
        [msgspec.structs.replace(s, parameters=tuple(p for w in s.parameters for p in parameters(w))) for s in syncs],
        precision=precision,
        **others,
    )


def check_same(task: str, plan: Plan, steps: int, tolerance: float = 1e-5) -> None:
    precision = plan.parts[0].precision  # type: ignore[union-attr]
    found = train(TASKS[task], plan, CLUSTER, pieces_of(task, precision), steps)
    assert_same(found, reference(TASKS[task], plan, steps), tolerance)


TWO = [stage("0-2 a4"), stage("3-z b4")]
BOTH = sync("ring 0-z ab")


@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "interleaved"])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_schedules_and_optimizers(schedule: str, optimizer: Optimizer, steps: int) -> None:
    plan = named("chain", TWO, [], batch=12, micro_batches=3, schedule=schedule, optimizer=optimizer)
    check_same("chain", plan, steps)


def test_interleaved_stages_take_turns_on_two_devices(steps: int) -> None:
    stages = [stage("0-1 a2"), stage("2-3 b2"), stage("4-5 a2"), stage("6-z b2")]
    check_same("chain", named("chain", stages, [], batch=8, micro_batches=4, schedule="interleaved"), steps)


@pytest.mark.parametrize("how", ["ring", "tree", "server"])
def test_syncs_with_unequal_shares(how: str, steps: int) -> None:
    stages = [stage("0-z a3 b5/2 e4")]
    syncs = [
        sync(f"{how} 0-3 abe", root="b" if how == "server" else None, segments=3),
        sync(f"{how} 4-z eab", root="d" if how == "server" else None),
    ]
    check_same("chain", named("chain", stages, syncs, batch=24, micro_batches=2), steps)


def test_factors_equal_a_ring(steps: int) -> None:
    stages = [stage("0-z a3 b5/2 e4")]
    linear = "h.0.up.weight,h.2.down.weight,h.5.up.weight"
    syncs = [sync(f"factors {linear} abe"), sync("ring 0-z abe")]
    check_same("chain", named("chain", stages, syncs, batch=24, micro_batches=2), steps)


@pytest.mark.parametrize("state", ["sharded-optimizer", "sharded-all"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_state_layouts(state: str, clip: float | None, steps: int) -> None:
    stages = [stage("0-3 a5 b7", state=state), stage("4-z c7 b5", state=state, recompute=True)]
    syncs = [sync("ring 0-3 ab", segments=2), sync("ring 4-z cb")]
    optimizer = Optimizer(learning_rate=1e-2, clip=clip)
    check_same("chain", named("chain", stages, syncs, batch=24, micro_batches=2, optimizer=optimizer), steps)


def test_a_sharded_optimizer_over_a_tree(steps: int) -> None:
    stages = [stage("0-z a3 b5 e4", state="sharded-optimizer")]
    check_same("chain", named("chain", stages, [sync("tree 0-z abe")], batch=12), steps)


def test_from_n_replicas_to_m_in_slices(steps: int) -> None:
    stages = [stage("0-2 a3/2 b9/3", recompute=True), stage("3-5 e5 f4 a3"), stage("6-z c12/5")]
    syncs = [sync("ring 0-2 ab"), sync("ring 3-5 efa")]
    check_same("chain", named("chain", stages, syncs, batch=36, micro_batches=3), steps)


def test_side_by_side_pipelines_of_different_depth(steps: int) -> None:
    stages = [stage("0-1 a8 e4"), stage("2-3 a8 f4"), stage("4-5 b8 g4"), stage("6-z b8 h4")]
    syncs = [sync("ring 0-1 ae"), sync("ring 2-3 af"), sync("ring 4-5 bg"), sync("ring 6-z bh", segments=4)]
    check_same("chain", named("chain", stages, syncs, batch=48, micro_batches=4, ahead=1), steps)


def test_duplicate_stages(steps: int) -> None:
    stages = [stage("0-2 a6/2 b6"), stage("3-5 a6 b6"), stage("6-z b4 c2")]
    syncs = [sync("duplicate 0-5 ab"), sync("ring 6-z bc")]
    check_same("chain", named("chain", stages, syncs, batch=12, micro_batches=2), steps)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_branches_placed_apart(micro_batches: int, steps: int) -> None:
    stages = [stage("0-0 a2 b2"), stage("1-2 c4"), stage("3-4 d3 e1"), stage("5-z c1 a3")]
    syncs = [sync("ring 0-0 ab"), sync("ring 3-4 de"), sync("ring 5-z ca")]
    check_same(
        "branches", named("branches", stages, syncs, batch=4 * micro_batches, micro_batches=micro_batches), steps
    )


def test_tied_weights_in_two_stages(steps: int) -> None:
    stages = [stage("0-3 a2 b1"), stage("4-z c1 a2")]
    syncs = [sync("ring transformer.wte.weight abc"), sync("ring 0-3 ab"), sync("ring 4-z ca")]
    check_same("gpt", named("gpt", stages, syncs, batch=6, micro_batches=2, optimizer=Optimizer(clip=0.5)), steps)


@pytest.mark.parametrize("task", ["normed", "wilful"])
def test_batch_norm_and_models_that_cannot_be_exported(task: str, steps: int) -> None:
    check_same(
        task, named(task, [stage("0-1 a4"), stage("2-z b4")], [], batch=8, micro_batches=2, optimizer=SGD), steps
    )


def test_replicas_share_batch_statistics(steps: int) -> None:
    stages = [stage("0-1 a3 b5"), stage("2-z c8")]
    check_same(
        "normed", named("normed", stages, [sync("ring 0-1 ab")], batch=16, micro_batches=2, optimizer=SGD), steps
    )


@pytest.mark.parametrize("task", ["dropout", "gpt-dropout"])
def test_dropout_does_not_depend_on_the_plan(task: str) -> None:
    pieces, steps = pieces_of(task), 3
    alone = named(task, [stage("0-z a6")], [], batch=12, micro_batches=2, optimizer=SGD)
    stages = [stage("0-2 a2/2 b4", recompute=True), stage("3-z c5 a1")]
    ties = [sync("ring transformer.wte.weight abc")] if task == "gpt-dropout" else []
    other = named(
        task, stages, [*ties, sync("ring 0-2 ab"), sync("ring 3-z ca")], batch=12, micro_batches=2, optimizer=SGD
    )
    wanted = train(TASKS[task], alone, CLUSTER, pieces, steps)
    assert_same(train(TASKS[task], other, CLUSTER, pieces, steps), wanted)
    assert wanted.losses[0] != pytest.approx(reference(TASKS[task], alone, 1).losses[0], rel=1e-4)


@pytest.mark.parametrize("precision,tolerance", [("bf16", 0.03), ("fp16", 5e-3)])
def test_sixteen_bits(precision: str, tolerance: float, steps: int) -> None:
    stages = [stage("0-3 a2 b4", recompute=True), stage("4-z c6")]
    steady = Optimizer(name="sgd", learning_rate=0.02, momentum=0.9)  # at ten times that, roundings grow with each step
    plan = named("chain", stages, [sync("ring 0-3 ab")], precision, batch=12, micro_batches=2, optimizer=steady)
    check_same("chain", plan, steps, tolerance)


def grouped(task: str, **others: Any) -> Plan:
    """Two tensor groups of two as replicas of a stage, then another."""
    ties = [] if task == "chain" else [sync("ring transformer.wte.weight ace")]
    stages = [stage("0-3 ab4 cd2"), stage("4-z ef6")]
    return named(task, stages, [*ties, sync("ring 0-3 ac")], batch=12, micro_batches=2, **others)


@pytest.mark.parametrize("task", ["chain", "gpt"])
def test_tensor_groups(task: str, steps: int) -> None:
    check_same(task, grouped(task, optimizer=Optimizer(name="sgd", learning_rate=0.2, momentum=0.9, clip=0.5)), steps)


@pytest.mark.slow("traces two models with dropout; `test_randomness` has draws of a group")
def test_tensor_groups_draw_what_the_whole_would() -> None:
    alone = named("gpt-dropout", [stage("0-z a6")], [], batch=12, micro_batches=2, optimizer=SGD)
    wanted = train(TASKS["gpt-dropout"], alone, CLUSTER, pieces_of("gpt-dropout"), 2)
    plan = grouped("gpt-dropout", optimizer=SGD)
    assert_same(train(TASKS["gpt-dropout"], plan, CLUSTER, pieces_of("gpt-dropout"), 2), wanted)


def test_tensor_groups_with_sharded_state(steps: int) -> None:
    stages = [stage("0-z ab4 cd2", state="sharded-optimizer", recompute=True)]
    check_same("gpt", named("gpt", stages, [sync("ring 0-z ac")], batch=6, optimizer=SGD), steps)
