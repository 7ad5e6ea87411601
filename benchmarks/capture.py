"""What it takes to know a model: every zoo model is built and captured on the meta device, in a process of its own.

Parameter counts are compared with the published ones, FLOPs of GPT-3 with 6 x parameters x tokens, and the command
`isthmus model show zoo:gpt3-175b` is held to the time and memory of a laptop, first with an empty cache, then again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from _results import Claim, at_most, equal, finish, options

from isthmus.model import zoo

# torchvision's documentation; the GPT-2 release
PUBLISHED = {"vgg19": 143_667_240, "resnet101": 44_549_160, "gpt2-xl": 1_557_611_200}
LARGE = "gpt3-175b"
QUICK = (*PUBLISHED, LARGE)

CAPTURE = """
import json, sys, time
from isthmus.model.source import load_graph
began = time.perf_counter()
graph = load_graph("zoo:" + sys.argv[1], cache=False)
print(json.dumps({
    "parameters": graph.elements, "flops_per_sample": graph.flops, "blocks": len(graph.blocks),
    "sequence": graph.sequence, "seconds": time.perf_counter() - began,
}))
"""
COMMAND = "import sys; from isthmus.cli.main import main; sys.exit(main())"


class Ran(NamedTuple):
    """A finished process."""

    output: str
    seconds: float  # from start to end, imports included
    peak_bytes: float


def run_alone(words: Sequence[str], cache: str) -> Ran:
    """Run Python code in a process of its own."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-c", *words], stdout=output, env=os.environ | {"ISTHMUS_CACHE": cache}
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(words[1:])} failed with exit code {process.returncode}")
        output.seek(0)
        unit = 1 if sys.platform == "darwin" else 1024
        return Ran(output.read().decode(), seconds, usage.ru_maxrss * unit)


def capture_row(name: str, cache: str) -> dict[str, Any]:
    ran = run_alone([CAPTURE, name], cache)
    found = json.loads(ran.output)
    return {
        "model": name,
        **{key: found[key] for key in ("parameters", "flops_per_sample", "blocks", "sequence")},
        "published_parameters": PUBLISHED.get(name),
        "capture_seconds": found["seconds"],
        "process_seconds": ran.seconds,
        "peak_gigabytes": ran.peak_bytes / 1e9,
    }


def command_row(cached: bool, cache: str) -> dict[str, Any]:
    """The command itself, as a person would give it."""
    ran = run_alone([COMMAND, "model", "show", f"zoo:{LARGE}", "--json"], cache)
    shown = json.loads(ran.output)
    return {
        "model": f"isthmus model show zoo:{LARGE}, {'again' if cached else 'nothing cached'}",
        "parameters": shown["parameters"],
        "flops_per_sample": shown["flops_per_sample"],
        "process_seconds": ran.seconds,
        "peak_gigabytes": ran.peak_bytes / 1e9,
    }


def claims_of(rows: dict[str, dict[str, Any]], first: dict[str, Any], again: dict[str, Any]) -> list[Claim]:
    large = rows[LARGE]
    usual = 6.0 * large["parameters"] * large["sequence"]
    return [
        *(
            equal(f"Parameters of {name}, equal to the published number", rows[name]["parameters"], n)
            for name, n in PUBLISHED.items()
        ),
        at_most(
            f"Relative error of the FLOPs of {LARGE} against 6 x parameters x tokens",
            abs(large["flops_per_sample"] / usual - 1),
            0.03,
        ),
        at_most(f"Seconds for isthmus model show zoo:{LARGE}", first["process_seconds"], 60),
        at_most(f"Peak memory of isthmus model show zoo:{LARGE}, in GB", first["peak_gigabytes"], 3),
        at_most(f"Seconds for isthmus model show zoo:{LARGE} from the cache", again["process_seconds"], 1),
    ]


def main() -> int:
    called = options("capture", __doc__)
    with tempfile.TemporaryDirectory() as cache:
        rows = {name: capture_row(name, cache) for name in (QUICK if called.quick else zoo.names())}
        first, again = command_row(False, cache), command_row(True, cache)
    large = rows[LARGE]
    flops = {
        "forward_and_backward_of_one_sample": large["flops_per_sample"],
        "six_parameters_tokens": 6.0 * large["parameters"] * large["sequence"],
    }
    claims = claims_of(rows, first, again)
    return finish(called, [*rows.values(), first, again], claims, others={f"flops_of_{LARGE}": flops})


if __name__ == "__main__":
    sys.exit(main())
