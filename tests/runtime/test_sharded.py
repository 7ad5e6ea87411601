"""State `sharded-all`: what is kept of weights and gradients, when the rest comes and goes; nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import sleep
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from isthmus.cost.simulate import Prepared, Simulator
from isthmus.model.job import Optimizer
from isthmus.plan.types import Plan, Stage
from isthmus.runtime.buckets import Bucket
from isthmus.runtime.program import Program, StageRun, programs
from isthmus.runtime.weight_turns import can_play, turns
from isthmus.runtime.worker import Worker
from tests.runtime import world
from tests.runtime.tasks import TASKS, pieces_of
from tests.runtime.test_plans import CLUSTER, SGD, named, stage, sync
from tests.runtime.world import assert_same, reference, train

STEPS = 4
CLIPPED = Optimizer(learning_rate=1e-2, clip=0.3)


def check(task: str, plan: Plan, tolerance: float = 1e-5) -> None:
    precision = plan.parts[0].precision  # type: ignore[union-attr]
    found = train(TASKS[task], plan, CLUSTER, pieces_of(task, precision), STEPS)
    assert_same(found, reference(TASKS[task], plan, STEPS), tolerance)


def shared(blocks: str, replicas: str, **state: Any) -> Stage:
    return stage(f"{blocks} {replicas}", state="sharded-all", **state)


def made(task: str, plan: Plan) -> dict[str, Program]:
    return programs(plan, CLUSTER, {"job": pieces_of(task).graph})


LAYERS = [sync("ring 0-1 ab"), *(sync(f"ring {block} ab", segments=block % 3 + 1) for block in range(2, 7))]
ONE_STAGE = [shared("0-z", "a6/2 b6/2")]


def layers(schedule: str = "fill-drain", **others: Any) -> Plan:
    """One stage of six parts: two blocks, then a block each, of which the last has the model's head too."""
    last = msgspec.structs.replace(LAYERS[-1], parameters=("6-z",))
    others = {"batch": 24, "micro_batches": 2, "optimizer": CLIPPED, "schedule": schedule, **others}
    return named("chain", ONE_STAGE, [*LAYERS[:-1], last], **others)


# -- what is there when


class Counting(Worker):
    """Notes the bytes of weights and of gradients whenever a stretch begins: at no other moment do they grow."""

    all: ClassVar[list[Counting]] = []

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.weights, self.gradients = 0, 0
        Counting.all.append(self)

    def before(self, run: StageRun, stretch: int, backward: bool) -> None:
        super().before(run, stretch, backward)
        self.weights = max(self.weights, sum(b.weights.untyped_storage().size() for b in self.buckets))
        self.gradients = max(self.gradients, sum(b.gradients.untyped_storage().size() for b in self.buckets))

    def close(self) -> None:
        channels = {b.spec.number: (f"job weights {b.spec.number}", b.spec.members) for b in self.buckets}
        self.pushed = {
            number: sum(self.network.channel(name, m).bytes_sent for m in members if m != self.program.device)
            for number, (name, members) in channels.items()
        }
        super().close()

    def pieces(self) -> int:
        """Bytes of what is always there."""
        kept = [t for bucket in self.buckets for t in (bucket.gradient, *self.updater.state(bucket).values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counting]:
    monkeypatch.setattr(world, "Worker", Counting)
    monkeypatch.setattr(Counting, "all", [])
    return Counting.all


def slowly(work: Callable[[Bucket], None]) -> Callable[[Bucket], None]:
    def slow(bucket: Bucket) -> None:
        sleep(0.02)
        work(bucket)

    return slow


def test_memory_is_what_the_simulator_counts(counted: list[Counting], monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of everything, two parts of weights and, on a slow network, two of gradients; never more."""
    monkeypatch.setattr(Bucket, "scatter", slowly(Bucket.scatter))
    plan = layers()
    train(TASKS["chain"], plan, CLUSTER, pieces_of("chain"), 1)
    simulator, part = Simulator(CLUSTER, {"job": pieces_of("chain").graph}), plan.parts[0]
    prepared = simulator.prepare(part, simulator.fabric(plan))
    assert isinstance(prepared, Prepared)
    sizes = [sum(pieces_of("chain").graph.parameter[n].elements for n in b.names) * 4 for b in counted[0].buckets]
    for worker in counted:
        order = turns(worker.program)
        two = max(sizes[a.stretch] + sizes[b.stretch] for a, b in pairwise(order) if a.stretch != b.stretch)
        assert worker.weights == two
        assert max(sizes) < worker.gradients <= two
        assert worker.weights + worker.gradients < sum(sizes)
        assert worker.pieces() == pytest.approx(sum(sizes) * 4 / 2, rel=1e-3)
    most = max(worker.pieces() + worker.weights + worker.gradients for worker in counted)
    assert 0.9 * prepared.flat.state.max() < most < 1.001 * prepared.flat.state.max()


def test_nothing_but_pieces_is_there_between_steps(counted: list[Counting]) -> None:
    train(TASKS["chain"], layers(), CLUSTER, pieces_of("chain"), 2)
    for bucket in (bucket for worker in counted for bucket in worker.buckets):
        assert bucket.weights.untyped_storage().size() == bucket.gradients.untyped_storage().size() == 0
        assert bucket.piece.numel() == bucket.gradient.numel() == bucket.bounds[1] - bucket.bounds[0]


@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b"])
def test_weights_are_fetched_for_each_turn_but_not_twice_in_a_row(schedule: str, counted: list[Counting]) -> None:
    train(TASKS["chain"], layers(schedule), CLUSTER, pieces_of("chain"), 1)
    for worker in counted:
        order = [turn.stretch for turn in turns(worker.program)]
        fetched = [u for at, u in enumerate(order) if at == 0 or order[at - 1] != u]
        assert len(order) - len(fetched) == (1 if schedule == "fill-drain" else 3)  # where forward and backward meet
        for u, bucket in enumerate(worker.buckets):
            note = 8  # says how often this worker asks
            assert worker.pushed[bucket.spec.number] == bucket.piece.numel() * 4 * fetched.count(u) + note


def test_sums_are_the_same_bits_each_time() -> None:
    once, again = (train(TASKS["chain"], layers(), CLUSTER, pieces_of("chain"), 2) for _ in range(2))
    assert once.losses == again.losses
    assert all(torch.equal(tensor, again.weights[name]) for name, tensor in once.weights.items())


# -- nothing is lost


def test_parts_of_a_stage_in_slices() -> None:
    check("chain", layers())


def test_a_tie_between_parts_of_a_stage() -> None:
    stages = [shared("0-z", "a2 b1 c3", recompute=True)]
    syncs = [sync("ring transformer.wte.weight,0-1 cab"), sync("ring 2-3 abc"), sync("ring 4-z bca")]
    plan = named("gpt", stages, syncs, batch=12, micro_batches=2, schedule="1f1b", optimizer=CLIPPED)
    assert max(len(run.stretches) for program in made("gpt", plan).values() for run in program.runs) == 3
    check("gpt", plan)


def test_buckets_of_blocks_that_take_turns() -> None:
    syncs = [sync("ring 0,2,4 ab"), sync("ring 1,3,5-z ba")]
    check("chain", named("chain", [shared("0-z", "a2/2 b4/2")], syncs, batch=12, micro_batches=2, optimizer=SGD))


def test_masks() -> None:
    stages = [shared("0-3", "a2 b4", kept=0.5), shared("4-z", "b4 a2", kept=0.5)]
    syncs = [sync("ring 0-3 ab"), sync("ring 4-z ab")]
    check("chain", named("chain", stages, syncs, batch=12, micro_batches=2, optimizer=CLIPPED, sparsity=0.5))


@pytest.mark.parametrize("precision,tolerance", [("bf16", 0.03), ("fp16", 5e-3)])
def test_sixteen_bits(precision: str, tolerance: float) -> None:
    steady = Optimizer(name="sgd", learning_rate=0.02, momentum=0.9)
    syncs = [sync("ring 0-3 ab"), sync("ring 4-z ab")]
    plan = named(
        "chain", [shared("0-z", "a2 b4")], syncs, precision, batch=12, micro_batches=2, optimizer=steady
    )  # fmt: skip
    check("chain", plan, tolerance)


def test_tensor_groups() -> None:
    syncs = [sync("ring transformer.wte.weight,0-2 ac"), sync("ring 3-z ca")]
    check("gpt", named("gpt", [shared("0-z", "ab4 cd2")], syncs, batch=12, micro_batches=2, optimizer=SGD))


def test_a_bucket_of_stages_with_different_states() -> None:
    """It is kept as its most generous stage says: weights whole."""
    stages = [shared("0-2", "a2 b4"), stage("3-z a2/2 b4/1")]
    plan = named("chain", stages, [sync("ring 0-z ab")], batch=12, micro_batches=2, optimizer=SGD)
    assert {b.layout for program in made("chain", plan).values() for b in program.buckets} == {"sharded-optimizer"}
    check("chain", plan)


def test_pipelines_of_different_depth_side_by_side() -> None:
    """Members that go through their stages in unlike orders ask for weights unlike numbers of times."""
    stages = [shared("0-1", "a4 b4"), stage("2-3 a4 c4"), shared("4-5", "a4 b4"), stage("6-z a4 d4")]
    syncs = [sync("ring 0-1 ab"), sync("ring 2-3 ac"), sync("ring 4-5 ab"), sync("ring 6-z ad")]
    plan = named("chain", stages, syncs, batch=32, micro_batches=4, schedule="1f1b", optimizer=SGD)
    check("chain", plan)


# -- nobody waits for ever


def crossed() -> Plan:
    """Two backwards of the last stage before one of the stage before it, which the other needs to go on."""
    stages = [
        stage("0-0 a6/5 e1", recompute=True), stage("1-1 e7"), stage("2-2 a6/5 e1", state="sharded-optimizer"),
        shared("3-z", "a5/2 e2/2", recompute=True),
    ]  # fmt: skip
    syncs = [sync("ring 0 ea"), sync("ring 2 ae"), sync("ring 3-z ae")]
    return named("chain", stages, syncs, batch=28, micro_batches=4, schedule="fill-drain", ahead=2, optimizer=SGD)


def test_where_replicas_would_wait_for_each_other_sums_come_late() -> None:
    plan = crossed()
    found = made("chain", plan)
    assert all(bucket.late for program in found.values() for bucket in program.buckets)
    at_once = {
        device: msgspec.structs.replace(
            program, buckets=tuple(msgspec.structs.replace(bucket, late=False) for bucket in program.buckets)
        )
        for device, program in found.items()
    }
    assert not can_play(at_once, pieces_of("chain").graph)
    check("chain", plan)


def test_usual_plans_sum_at_once() -> None:
    for plan in (layers(), layers("1f1b"), layers("interleaved")):
        assert not any(bucket.late for program in made("chain", plan).values() for bucket in program.buckets)


def test_a_sum_that_fails_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bucket: Bucket) -> None:
        raise ArithmeticError(bucket.spec.name)

    monkeypatch.setattr(Bucket, "scatter", fail)
    with pytest.raises(ArithmeticError):
        train(TASKS["chain"], layers(), CLUSTER, pieces_of("chain"), 1)
