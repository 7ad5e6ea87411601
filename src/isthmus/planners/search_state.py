"""The state of a whole search for one problem: what it has counted, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from isthmus.cost.simulate import Price, Simulator
from isthmus.plan.types import Plan
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.search_constants import PRICE_DEVICE_EFFORT, PRICE_EFFORT, TASK_EFFORT
from isthmus.planners.stop import Stop

__all__ = ["SearchState", "Watch"]

Watch = Callable[[Price], None]  # is told the price of every plan


class SearchState:
    """Counters that all parts of a search share.

    `calls` counts the plans that were priced. `effort` is the seconds that planning takes on a usual machine: each
    piece of work adds about what it takes there. A search that ends by its effort so gives the same plan on every
    machine.
    """

    copied = False  # whether plans are priced as several copies side by side

    def __init__(self, problem: Problem, watch: Watch | None = None) -> None:
        self.problem, self.watch = problem, watch
        self.calls, self.effort = 0, 0.0
        self.stop: Stop | None = None  # where the present search ends; None: nowhere

    @contextmanager
    def stopping(self, stop: Stop) -> Iterator[None]:
        """Let pricing a plan raise SearchEnded, as long as the context lasts, where `stop` has nothing left."""
        before, self.stop = self.stop, stop
        try:
            yield
        finally:
            self.stop = before

    @property
    def price_effort(self) -> float:
        """Return the seconds to price one plan, besides what its tasks take."""
        return PRICE_EFFORT + PRICE_DEVICE_EFFORT * len(self.problem.usable)

    def price(self, plan: Plan) -> Candidate:
        """Return the plan with its price."""
        return Candidate(plan, self.counted_price(self.problem.simulator, plan))

    def count_call(self) -> None:
        """Count a call of the simulator; raise SearchEnded where the search may make no more."""
        if self.stop is not None:
            self.stop.take()
        self.calls += 1

    def counted_price(self, simulator: Simulator, plan: Plan) -> Price:
        """Return a plan's price, and count the call and its effort."""
        self.count_call()
        before = simulator.tasks
        price = simulator.price(plan)
        self.effort += self.price_effort + TASK_EFFORT * (simulator.tasks - before)
        if self.watch is not None:
            self.watch(price)
        return price
