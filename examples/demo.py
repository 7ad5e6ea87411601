"""Plans a small GPT for two regions, then trains it there in three ways, to compare them.

1. Data parallelism over all devices with equal shares, which is what users of DDP run.
2. The best of the usual schemes, each searched to its end; the table names it.
3. The plan that Isthmus finds.

The two regions are emulated on this machine: every host is a network namespace, a router keeps the links' bandwidth
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
DEVICES = 4  # of the cluster
Way = tuple[str, tuple[str, ...]]  # what it is called, and how it is planned


def main() -> None:
    """Measures, plans, trains, compares."""
    BUILD.mkdir(exist_ok=True)
    profile, page = f"{BUILD}/demo.profile.json", f"{BUILD}/demo.html"
    isthmus("profile", MODEL, "--sequence", "64", "--emulate", CLUSTER, "-o", profile)
    ours = planned("auto", profile)
    ways: dict[str, Way] = {
        "all": (f"data parallelism over all {DEVICES} devices, even shares", every_device()),
        **best_scheme(ours["baselines"]),
    }
    for name, (_, words) in ways.items():
        planned(name, profile, *words)
    same = "" if ours["planner"] == "auto" else f": the plan of the scheme {ours['planner']}"
    labels = {name: label for name, (label, _) in ways.items()} | {"auto": f"what Isthmus finds{same}"}
    results = {name: trained(name, profile) for name in labels}
    isthmus("report", f"{BUILD}/demo-auto.json", "--profile", profile, "--run", f"{BUILD}/demo-auto.jsonl", "-o", page)
    tell(labels, results, page)


def every_device() -> tuple[str, ...]:
    """Return how a whole replica on every device is asked for."""
    return "--planner", "grid", "--fix", f"tp=1,pp=1,dp={DEVICES}"


def best_scheme(baselines: dict[str, float | None]) -> dict[str, Way]:
    """Return the fastest of the schemes that were searched to their end."""
    found = {name: seconds for name, seconds in baselines.items() if seconds is not None}
    best = min(found, key=lambda name: found[name])
    return {"scheme": (f"the best usual scheme: {best}", ("--planner", best))}


def planned(name: str, profile: str, *words: str) -> dict[str, Any]:
    """Plan in one way."""
    plan = f"{BUILD}/demo-{name}.json"
    return isthmus("plan", MODEL, "--cluster", CLUSTER, *JOB, "--profile", profile, *words, "-o", plan)


def trained(name: str, profile: str) -> dict[str, Any]:
    """Train by a plan, in the emulated cluster."""
    plan, events = f"{BUILD}/demo-{name}.json", f"{BUILD}/demo-{name}.jsonl"
    return isthmus("train", plan, "--emulate", "--profile", profile, "--steps", str(STEPS), "--events", events)


def isthmus(*words: str) -> dict[str, Any]:
    """Runs a command, with its progress, and gives what it answers."""
    print(f"\n$ isthmus {' '.join(words)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "isthmus.cli.main", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    if done.returncode:
        sys.exit("the command failed")
    return answer


def tell(labels: dict[str, str], results: dict[str, dict[str, Any]], page: str) -> None:
    """Print the three ways beside each other."""
    width = max(map(len, labels.values())) + 2
    print(f"\n{'a step of training':{width}}{'predicted':>10}{'measured':>10}   loss after {STEPS} steps")
    for name, label in labels.items():
        row = results[name]
        predicted, measured = row["predicted_step_seconds"], row["step_seconds"]
        print(f"{label:{width}}{predicted:>8.2f} s{measured:>8.2f} s   {row['loss']:.5f}")
    print()
    ours = results["auto"]
    if ours["predicted_step_seconds"] == results["scheme"]["predicted_step_seconds"]:
        print("Here no plan is faster than that scheme's: the last two rows differ by chance only.")
    for name in [name for name in labels if name != "auto"]:
        measured = results[name]["step_seconds"] / ours["step_seconds"]
        predicted = results[name]["predicted_step_seconds"] / ours["predicted_step_seconds"]
        print(f"Speed-up over {labels[name]}: {measured:.2f} x measured, {predicted:.2f} x predicted.")
    if not ours["shaped"]:
        print("Links were not emulated, which needs Linux and root: on the cluster's own the prediction holds.")
    print(f"The plan and the run as a page: {page}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
