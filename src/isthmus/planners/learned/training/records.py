"""Searches many problems in several processes, and keeps what they found in a file: a line for each problem."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from isthmus.planners.learned.decisions import even
from isthmus.planners.learned.prior import NetworkPrior, load_network
from isthmus.planners.learned.training.collect import collect
from isthmus.planners.learned.training.record import Record

__all__ = ["gather", "read_records"]


def read_records(file: Path) -> list[Record]:
    """Read all whole lines of a file of records; problems without a plan are left out."""
    found = [record for record in _lines(file) if record.leaves and record.feedback]
    return sorted(found, key=lambda record: record.seed)


def _lines(file: Path) -> Iterator[Record]:
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            yield msgspec.json.decode(line, type=Record)
        except msgspec.DecodeError:
            continue  # the last line of a run that was killed


def gather(file: Path, seeds: range, workers: int, network: Path | None, console: Console, blind: str = "") -> None:
    """Search the problems that are not in the file yet, and add them to it."""
    known = {record.seed for record in _lines(file)}
    missing = [seed for seed in seeds if seed not in known]
    if not missing:
        return
    with (
        Progress(console=console) as progress,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        file.open("ab") as out,
    ):
        out.write(b"\n")  # ends what a run that was killed left
        task = progress.add_task(file.stem, total=len(seeds), completed=len(known))
        waiting = [pool.submit(_one, seed, network, blind) for seed in missing]
        try:
            for done in as_completed(waiting):
                out.write(msgspec.json.encode(done.result()) + b"\n")
                out.flush()
                progress.advance(task)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _one(seed: int, network: Path | None, blind: str) -> Record:
    """Search a problem in a process of its own."""
    found = load_network(network) if network is not None else None
    record = collect(seed, prior=NetworkPrior(found, blind) if found is not None else even)
    return record if record is not None else Record(seed, [], [])
