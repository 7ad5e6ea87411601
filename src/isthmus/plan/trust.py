"""Plans are data: code that only a plan names is refused until the caller names it too."""

from __future__ import annotations

from collections.abc import Collection

from isthmus.errors import PlanError
from isthmus.model.job import Job
from isthmus.model.load_job import named_code

__all__ = ["check_trust"]


def check_trust(jobs: Collection[Job], trusted: Collection[str], *, runs: bool = False, flags: bool = False) -> None:
    """Refuse code that the jobs of a plan name and `trusted` does not, all of it in one error.

    Pricing a plan imports its models; where the jobs run, their data and losses are imported as well. `flags`: the
    caller is a command, and the error says what to type.
    """
    named = [(job, name) for job in jobs for name in named_code(job) if runs or name == job.model]
    missing = {name: job.name for job, name in named if name not in trusted}
    if missing:
        raise PlanError(
            "trust",
            f"the plan names code for job {', '.join(dict.fromkeys(missing.values()))}, "
            "and Isthmus does not run code just because a plan names it",
            where="plan",
            found=", ".join(missing),
            next=f"If you trust it, name it yourself: {_remedy(missing, flags=flags)}",
        )


def _remedy(names: Collection[str], *, flags: bool) -> str:
    if flags:
        return " ".join(f"--model {name}" for name in names)
    quoted = [f'"{name}"' for name in names]
    return f"trusted=[{', '.join(quoted)}]"
