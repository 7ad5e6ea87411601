"""Details on which the compiled path and its judge once disagreed: one minimal plan each."""

from __future__ import annotations

import msgspec
import pytest

from isthmus.cost.simulate import Simulator
from isthmus.cost.task_list import KINDS
from isthmus.errors import PlanError
from isthmus.plan.text import parse
from isthmus.plan.types import Plan
from isthmus.plan.validate import check
from tests.cost.reference_plan import Judgement, judge
from tests.cost.test_simulate import same_memory, same_times
from tests.plan.golden_files import cluster
from tests.plan.small_models import chain

HEAD = "plan for atlantic\npipeline job: small:chain, batch {batch}, precision fp32\n"

TIMES = {
    "with spill all the host updates before the last gradients have come": """
  schedule 1f1b, micro-batches 1
  stage embed .. head, spill all
    va2/old/0: share 4
""",
    "a tied weight of one stage goes over the bus twice": """
  schedule 1f1b, micro-batches 1
  stage embed .. head, spill optimizer
    va2/old/0: share 4
""",
    "a tied weight that [block] names twice in one bucket is sent twice": """
  schedule 1f1b, micro-batches 1
  stage embed .. head
    va2/old/0: share 2
    va2/old/1: share 2
  sync all ring: [embed] [h.1] [h.2] [h.3] [h.4] [h.5] [h.6] [head] over va2/old/0 va2/old/1
""",
    "a bucket waits for a block whose only parameter is in another bucket": """
  schedule 1f1b, micro-batches 1
  stage embed .. head
    va2/old/0: share 2
    va2/old/1: share 2
  sync table ring: embed.weight over va2/old/0 va2/old/1
  sync rest ring: [embed] [h.1] [h.2] [h.3] [h.4] [h.5] [h.6] over va2/old/0 va2/old/1
""",
    "a tensor group's devices load only their part of the weights, each over its own bus": """
  schedule 1f1b, micro-batches 1
  stage embed .. head, spill optimizer
    va2/old/0 + va2/old/1: share 4
""",
    "tensor groups gather only their members' parts": """
  schedule 1f1b, micro-batches 1
  stage embed .. h.6, sharded-all
    va2/old/0 + va2/old/1: share 2
    va2/old/2 + va2/old/3: share 2
  stage head .. head
    va1/fast/0: share 4
  sync all ring: [embed] [h.1] [h.2] [h.3] [h.4] [h.5] [h.6] over va2/old/0 va2/old/2
""",
    "a named weight that a tensor group divides is divided in its sync, and left out of its block's": """
  schedule 1f1b, micro-batches 1
  stage embed .. h.6
    va2/old/0 + va2/old/1: share 2
    va2/old/2 + va2/old/3: share 2
  stage head .. head
    va1/fast/0: share 4
  sync one ring: h.1.up h.1.down over va2/old/0 va2/old/2
  sync two ring: [h.1] over va2/old/0 va2/old/2
  sync rest ring: [embed] [h.2] [h.3] [h.4] [h.5] [h.6] over va2/old/0 va2/old/2
""",
    "members of tensor groups get all factors, and each redoes its own part of a split weight's product": """
  schedule 1f1b, micro-batches 2
  stage embed .. h.6
    va2/old/0 + va2/old/1: share 1
    va2/old/2 + va2/old/3: share 1
  stage head .. head
    va1/fast/0: share 2
  sync one factors: h.1.up h.2.down over va2/old/0 va2/old/2
  sync rest ring: [embed] [h.1] [h.2] [h.3] [h.4] [h.5] [h.6] over va2/old/0 va2/old/2
""",
    "a tied weight that devices hold alone in one stage and as leaders of tensor groups in another goes as one": """
  schedule 1f1b, micro-batches 1
  stage embed .. h.3
    va2/old/0 + va2/old/1: share 2
    va2/old/2 + va2/old/3: share 2
  stage h.4 .. h.5
    va1/fast/0: share 4
  stage h.6 .. head
    va2/old/0: share 2
    va2/old/2: share 2
  sync table ring: embed.weight over va2/old/0 va2/old/2
  sync low ring: [h.1] [h.2] [h.3] over va2/old/0 va2/old/2
  sync high ring: [h.6] over va2/old/0 va2/old/2
""",
    "a device that leads a tensor group in one stage and is alone in another": """
  schedule 1f1b, micro-batches 1
  stage embed .. h.3
    va2/old/0 + va2/old/1: share 2
    va2/old/2 + va2/old/3: share 2
  stage h.4 .. head
    va2/old/0: share 4
  sync all ring: [embed] [h.1] [h.2] [h.3] over va2/old/0 va2/old/2
""",
}

BYTES = {
    "what is gathered together must be there together": """
  schedule 1f1b, micro-batches 1
  stage embed .. head, sharded-all
    va2/old/0: share 2
    va2/old/1: share 2
  sync all ring: [embed] [h.1] [h.2] [h.3] [h.4] [h.5] [h.6] [head] over va2/old/0 va2/old/1
""",
    "sharded state that is spilled is on the host": """
  schedule 1f1b, micro-batches 1
  stage embed .. head, sharded-all, spill optimizer
    va2/old/0: share 2
    va2/old/1: share 2
  sync a ring: [embed] over va2/old/0 va2/old/1
  sync b ring: [h.1] over va2/old/0 va2/old/1
  sync c ring: [h.2] over va2/old/0 va2/old/1
  sync d ring: [h.3] over va2/old/0 va2/old/1
  sync e ring: [h.4] over va2/old/0 va2/old/1
  sync f ring: [h.5] over va2/old/0 va2/old/1
  sync g ring: [h.6] over va2/old/0 va2/old/1
  sync h ring: [head] over va2/old/0 va2/old/1
""",
    "members of tensor groups hold all factors that come in a micro-batch": """
  schedule 1f1b, micro-batches 2
  stage embed .. h.6
    va2/old/0 + va2/old/1: share 1
    va2/old/2 + va2/old/3: share 1
  stage head .. head
    va1/fast/0: share 2
  sync one factors: h.1.up h.2.down over va2/old/0 va2/old/2
  sync rest ring: [embed] [h.1] [h.2] [h.3] [h.4] [h.5] [h.6] over va2/old/0 va2/old/2
""",
    "a duplicate needs no buffer: nothing is sent": """
  schedule 1f1b, micro-batches 1
  stage embed .. head
    va2/old/0: share 4
    va2/old/1: share 4
  sync all duplicate: [embed] [h.1] [h.2] [h.3] [h.4] [h.5] [h.6] [head] over va2/old/0 va2/old/1
""",
}


STUCK = """
  schedule 1f1b, micro-batches 4
  stage embed .. embed
    va2/old/0: share 2
    va2/old/1: share 2
  stage h.1 .. h.3, sharded-all
    va2/old/2: share 2
    va2/old/0: share 2
  stage h.4 .. head
    va2/old/2: share 2
    va2/old/0: share 2
  sync low ring: [embed] over va2/old/0 va2/old/1
  sync middle ring: [h.1] [h.2] [h.3] over va2/old/2 va2/old/0
  sync high ring: [h.4] [h.5] [h.6] [head] over va2/old/2 va2/old/0
"""
UNEVEN = """
  schedule 1f1b, micro-batches 4
  stage embed .. head, sharded-all
    va2/old/0: share 2, slices 2
    va2/old/1: share 2
  sync all ring: [embed] [h.1] [h.2] [h.3] [h.4] [h.5] [h.6] [head] over va2/old/0 va2/old/1
"""


def _plan(body: str, batch: int = 4) -> Plan:
    return parse(HEAD.format(batch=batch) + body.lstrip("\n"))


def _case(body: str, why: str) -> tuple[Simulator, Plan, Judgement]:
    plan, models = _plan(body), {"job": chain(tied="tied" in why or "another bucket" in why)}
    check(plan, cluster(), models)
    return Simulator(cluster(), models), plan, judge(plan, cluster(), models)


@pytest.mark.parametrize("why", TIMES)
def test_times(why: str) -> None:
    simulator, plan, judged = _case(TIMES[why], why)
    assert same_times(simulator.play(plan), judged)


@pytest.mark.parametrize("why", BYTES)
def test_bytes(why: str) -> None:
    simulator, plan, judged = _case(BYTES[why], why)
    assert same_memory(simulator.price(plan), judged, cluster())


def test_replicas_that_wait_for_each_other_have_no_price() -> None:
    plan, models = _plan(STUCK, batch=16), {"job": chain()}
    check(plan, cluster(), models)
    price = Simulator(cluster(), models).price(plan)
    assert price.step_seconds == float("inf")
    assert "wait for each other" in price.impossible
    assert not price.fits
    with pytest.raises(PlanError, match="wait for each other"):
        Simulator(cluster(), models).play(plan)


def test_replicas_of_a_sharded_all_stage_have_equal_slices() -> None:
    """Its replicas gather slice by slice together."""
    with pytest.raises(PlanError):
        check(_plan(UNEVEN, batch=16), cluster(), {"job": chain()})


def test_hosts_update_on_their_processors() -> None:
    """Hosts without devices are relays; their number shifts no lane."""
    relay = msgspec.structs.replace(cluster().hosts["va1"], name="relay", devices={})
    wider = msgspec.structs.replace(cluster(), hosts={**cluster().hosts, "relay": relay})
    body = "  schedule 1f1b, micro-batches 1\n  stage embed .. head, spill optimizer\n    va1/fast/0: share 4\n"
    played = Simulator(wider, {"job": chain()}).play(_plan(body))
    lanes = played.tasks.tasks().lane[played.tasks.kind == KINDS.index("host update")]
    assert [played.fabric.lane_name(int(lane)) for lane in lanes] == [("va1", "processor")]
