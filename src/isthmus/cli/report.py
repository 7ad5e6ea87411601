"""The command `isthmus report PLAN -o FILE.html`."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from isthmus import __version__
from isthmus.cli.console import Answer, ProgressLine, check_folder
from isthmus.cli.simulate import price_again
from isthmus.cli.summary import facts_of, remarks_on, unused_in
from isthmus.cluster.load import cluster_digest
from isthmus.plan.file import load_plan
from isthmus.report.columns import columns
from isthmus.report.html import Subject, write_report
from isthmus.report.plan_text import shortage_line
from isthmus.report.run import check_run, read_run
from isthmus.report.times import times_facts
from isthmus.units import format_bytes, format_seconds

__all__ = ["run"]


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Price a plan again and write the result as a page, even if the plan does not fit."""
    check_folder(args.output)
    run_record = read_run(args.run) if args.run is not None else None
    file = load_plan(args.plan)
    if run_record is not None:
        check_run(run_record, file.plan)
    result = price_again(args, file, progress)
    same = file.cluster is None or cluster_digest(result.cluster) == cluster_digest(file.cluster)
    measured = ", ".join(args.profile)
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by isthmus {__version__}"
    progress.phase("Trying what would make unused devices useful")
    unused = unused_in(file, result, progress)
    progress.phase(f"Writing {args.output}")
    subject = Subject(
        file=file,
        cluster=result.cluster,
        price=result.price,
        timeline=result.timeline,
        made=made,
        same=same,
        match=result.inputs_match,
        times=tuple(times_facts(result.times, result.profile, measured)),
        run=run_record,
        unused=unused,
    )
    write_report(subject, args.output)
    size = Path(args.output).stat().st_size
    values = {
        "file": args.output,
        "bytes": size,
        "step_seconds": result.price.step_seconds,
        "measured_step_seconds": run_record.step_seconds if run_record is not None else None,
        "feasible": result.price.fits,
        "notes": [remark.text for remark in remarks_on(file, result)],
    }
    head = f"{args.output}: {format_seconds(result.price.step_seconds)} a step, a page of {format_bytes(size)}"
    text = "\n".join([head, "", *columns(facts_of(file, result, measured))])
    failure = None if result.price.fits else shortage_line(result.price)
    return Answer(values=values, text=text, failure=failure)
