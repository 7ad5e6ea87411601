"""One damaged file after the other, each told by its seed, kind and number; and how a reader took it."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from isthmus.errors import FileError, IsthmusError, PlanError
from tests.fuzz.kinds import KINDS, sign
from tests.fuzz.mutate import damage
from tests.fuzz.mutate_values import damage_values

__all__ = ["Case", "Verdict", "case_data", "cases", "judge"]

SLOWEST = 1.0  # seconds of processor time to read one file


class Case(NamedTuple):
    """A damaged file; `str` names it so that it can be made again."""

    seed: int
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.seed}/{self.kind}/{self.number}"


class Verdict(NamedTuple):
    """How a file was taken: `valid` or an error's name; `wrong` says what should not have happened, if anything."""

    outcome: str
    seconds: float
    wrong: str | None = None


def cases(seed: int, count: int) -> list[Case]:
    """`count` cases, the kinds in turn."""
    kinds = list(KINDS)
    return [Case(seed, kinds[number % len(kinds)], number // len(kinds)) for number in range(count)]


def case_data(case: Case) -> bytes:
    """The damaged file of a case: damage to its values, to its text, or to both."""
    random = Random(str(case))
    kind = KINDS[case.kind]
    data = random.choice(_seeds(case.kind))
    how = random.random()
    if kind.suffix != ".plan" and how < 0.6:
        data = damage_values(data, random, as_json=kind.suffix == ".json")
        if case.kind == "model" and random.random() < 0.8:
            data = _signed(data)
    if kind.suffix == ".plan" or how > 0.5:
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            data = damage(data, random)
    return data


def judge(kind: str, path: Path) -> Verdict:
    """Reads a file: it must give an object that stands, or our error with a place, within a second."""
    start = time.process_time()
    try:
        found = KINDS[kind].read(path)
        seconds = time.process_time() - start
        KINDS[kind].stands(found)
        outcome, wrong = "valid", None
    except IsthmusError as error:
        seconds = time.process_time() - start
        outcome, wrong = type(error).__name__, _bad_error(error, path)
    except Exception as error:
        seconds = time.process_time() - start
        outcome = wrong = f"{type(error).__name__}: {str(error)[:200]}"
    if wrong is None and seconds > SLOWEST:
        wrong = f"took {seconds:.2f} s"
    return Verdict(outcome, seconds, wrong)


def _bad_error(error: IsthmusError, path: Path) -> str | None:
    """What is wrong with an error: it has no place, or was met in reading and does not name the file."""
    reading = isinstance(error, FileError) or (isinstance(error, PlanError) and error.rule == "text")
    if not error.where or (reading and not error.where.startswith(str(path))):
        return f"no place in the file: {str(error)[:200]}"
    return None


@cache
def _seeds(kind: str) -> tuple[bytes, ...]:
    return KINDS[kind].seeds()


def _signed(data: bytes) -> bytes:
    plain = json.loads(data.decode("utf-8", "surrogatepass"))
    return json.dumps(sign(plain)).encode()
