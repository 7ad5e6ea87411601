"""Plans a small GPT for two regions, then trains it there twice: by the plan, and with plain data parallelism.

The two regions are acted out on this machine: every host is a network namespace, a router keeps the links' bandwidth
and latency, and processors are slowed down to the proportions of the cluster file. Without root the links stay as they
are, and the demonstration says so. It runs just the commands that it prints.

    python examples/demo.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CLUSTER = "examples/clusters/demo.yaml"
MODEL, JOB = "zoo:gpt-tiny", ("--sequence", "64", "--batch", "24", "--precision", "fp32")
STEPS = 8
BUILD = Path("build")
WAYS = {"auto": "the best that Isthmus finds", "data-even": "data parallelism, even shares"}


def main() -> None:
    """Measures, plans, trains, compares."""
    BUILD.mkdir(exist_ok=True)
    profile, page = f"{BUILD}/demo.profile.json", f"{BUILD}/demo.html"
    isthmus("profile", MODEL, "--sequence", "64", "--emulate", CLUSTER, "-o", profile)
    results = {}
    for planner in WAYS:
        plan, events = f"{BUILD}/demo-{planner}.json", f"{BUILD}/demo-{planner}.jsonl"
        isthmus("plan", MODEL, "--cluster", CLUSTER, *JOB, "--profile", profile, "--planner", planner, "-o", plan)
        results[planner] = isthmus(
            "train", plan, "--emulate", "--profile", profile, "--steps", str(STEPS), "--events", events
        )
    isthmus("report", f"{BUILD}/demo-auto.json", "--profile", profile, "--run", f"{BUILD}/demo-auto.jsonl", "-o", page)
    tell(results, page)


def isthmus(*words: str) -> dict[str, Any]:
    """Runs a command, with its progress, and gives what it answers."""
    print(f"\n$ isthmus {' '.join(words)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "isthmus.cli.main", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    if done.returncode:
        sys.exit("the command failed")
    return answer


def tell(results: dict[str, dict[str, Any]], page: str) -> None:
    """Both ways beside each other."""
    print(f"\n{'a step of training':32}{'predicted':>10}{'measured':>10}   loss after {STEPS} steps")
    for planner, name in WAYS.items():
        row = results[planner]
        predicted, measured = row["predicted_step_seconds"], row["step_seconds"]
        print(f"{name:32}{predicted:>8.2f} s{measured:>8.2f} s   {row['loss']:.5f}")
    best, plain = (results[planner] for planner in WAYS)
    foreseen = plain["predicted_step_seconds"] / best["predicted_step_seconds"]
    print(f"\nMeasured speed-up: {plain['step_seconds'] / best['step_seconds']:.2f} x (predicted {foreseen:.2f} x).")
    if not best["shaped"]:
        print("Links were not shaped, which needs Linux and root: on the cluster's own the prediction holds.")
    print(f"The plan and the run as a page: {page}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
