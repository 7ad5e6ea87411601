"""The command line: it turns words into one answer, and handles every way in which that can fail.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted, 141 nobody reads the answer any more. With --json
standard output has one JSON object and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from isthmus.cli.arguments import parse_arguments
from isthmus.cli.console import HUNG_UP, Answer, ProgressLine, Terminated, hung_up
from isthmus.errors import IsthmusError, NoPlanError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in takewhile("--".__ne__, words)  # looked up before parsing, for the parser's own errors
    try:
        return _ended(words, as_json)
    except BrokenPipeError as error:
        return HUNG_UP if hung_up() else _bug(error, as_json)


def _ended(words: Sequence[str], as_json: bool) -> int:
    """Return the exit code, however the command ends; raise BrokenPipeError if nobody reads its output."""
    try:
        args = parse_arguments(words)
    except SystemExit as done:  # --help and --version
        sys.stdout.flush()
        return done.code if isinstance(done.code, int) else 0
    except IsthmusError as error:
        return _fail(error, as_json)
    try:
        return _run(args, as_json)
    except Terminated as done:
        return done.status
    except SystemExit as left:
        return _fail(_left(left), as_json)
    except IsthmusError as error:
        return _fail(error, as_json)
    except KeyboardInterrupt:
        print("isthmus: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        return _bug(error, as_json)


def _left(left: SystemExit) -> IsthmusError:
    """Return an error: no command of ours exits in this way, and its code could pass off a failure as success."""
    last = traceback.extract_tb(left.__traceback__)[-1]
    return IsthmusError(
        "code that the command called has ended the program",
        where=f"{Path(last.filename).name} line {last.lineno}",
        found=f"sys.exit({'' if left.code is None else left.code!r:.80})",
        next="Raise an error there instead",
    )


def _run(args: argparse.Namespace, as_json: bool) -> int:
    args.out = sys.stdout
    command = import_module(f"isthmus.cli.{args.command}")
    # A model's own code may print, which is not part of the answer.
    with ProgressLine(sys.stderr) as progress, contextlib.redirect_stdout(sys.stderr):
        answer: Answer = command.run(args, progress)
    _say(_json(answer.values) if as_json else answer.text)
    if answer.failure is not None:
        print(f"isthmus: {answer.failure}", file=sys.stderr)
    return 0 if answer.failure is None else answer.exit_code


def _fail(error: IsthmusError, as_json: bool) -> int:
    for line in str(error).splitlines():  # a file's error has one line for each fault
        text = _one_line(line)
        print(text if text.startswith("isthmus") else f"isthmus: {text}", file=sys.stderr)
    if as_json:
        verdict = {"feasible": False} if isinstance(error, NoPlanError) else {}
        _say(_json({**verdict, "error": {"type": type(error).__name__, **error.as_dict()}}))
    return error.exit_code


def _bug(error: Exception, as_json: bool) -> int:
    if os.environ.get("ISTHMUS_TRACEBACK"):
        traceback.print_exception(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {_one_line(str(error))[:300]} ({Path(last.filename).name} line {last.lineno})"
    remedy = "ISTHMUS_TRACEBACK=1 shows where it happened; please report it with that"
    print(f"isthmus: this is a bug in Isthmus. {what}. {remedy}.", file=sys.stderr)
    if as_json:
        _say(_json({"error": {"type": "Bug", "what": what, "next": remedy}}))
    return 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, allow_nan=False)


def _say(text: str) -> None:
    with contextlib.suppress(AttributeError):  # streams that tests put in place
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
