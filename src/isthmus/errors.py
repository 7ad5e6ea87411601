"""Every error that Isthmus raises on purpose.

IsthmusError
├── UsageError        the command line or a call asks for something that is not offered   (exit 2)
├── FileError         a file cannot be read as what it says it is
│   ├── ClusterError  ... a cluster file
│   ├── JobError      ... a job or workload file
│   ├── ProfileError  ... a profile
│   └── CheckpointError  ... a checkpoint
├── ModelError        a model cannot be found, built or captured
├── DataError         samples or a loss cannot be found, or do not fit the model
├── PlanError         a plan breaks a rule
├── RunError          a run ended because a worker failed: says which, in which stage and step, and why
└── NoPlanError       nothing fits: says how many bytes are missing where
    └── NoPlanYetError  ... so far: the search ended before it had tried everything

Each says what is wrong, where, what was found, what was expected, and the next thing to do.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "ClusterError",
    "DataError",
    "FileError",
    "IsthmusError",
    "JobError",
    "ModelError",
    "NoPlanError",
    "NoPlanYetError",
    "PlanError",
    "ProfileError",
    "RunError",
    "UsageError",
]


def _shown(text: str) -> str:
    """Return text that a terminal prints and does not obey: escaped, and with 2000 characters at most.

    Errors quote names from files that anyone may have written.
    """
    text = text if len(text) <= 2000 else f"{text[:1200]} ... {text[-790:]}"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


class IsthmusError(Exception):
    """Base of all our errors; prints as `where: what. Found ... Expected ... next`."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        found: str | None = None,
        expected: str | None = None,
        next: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.found = found
        self.expected = expected
        self.next = next
        super().__init__(self._text())

    def _text(self) -> str:
        sentences = [
            self.what,
            f"Found {self.found}" if self.found is not None else None,
            f"Expected {self.expected}" if self.expected is not None else None,
            self.next,
        ]
        body = " ".join(s if s.endswith("?") else s.rstrip(".") + "." for s in sentences if s)
        return _shown(f"{self.where}: {body}" if self.where else body)

    def as_dict(self) -> dict[str, Any]:
        """Return the parts that are set, for `--json`."""
        parts = {
            "what": self.what,
            "where": self.where,
            "found": self.found,
            "expected": self.expected,
            "next": self.next,
        }
        return {key: value for key, value in parts.items() if value is not None}


class UsageError(IsthmusError):
    """The command line or a call asks for something that is not offered."""

    exit_code = 2


class FileError(IsthmusError):
    """A file cannot be read as what it says it is; `others` are further faults of the same file."""

    fault: object = None  # what the reader knows of the fault
    line: int = 0  # in the file; 0: unknown
    others: tuple[FileError, ...] = ()

    def __str__(self) -> str:
        """Return all faults, one line each."""
        return "\n".join([super().__str__(), *map(str, self.others)])

    def as_dict(self) -> dict[str, Any]:
        """Return the parts that are set, and those of the other faults."""
        others = [error.as_dict() for error in self.others]
        return super().as_dict() | ({"others": others} if others else {})


class ClusterError(FileError):
    """A cluster file describes something that cannot be."""


class JobError(FileError):
    """A job or workload file describes something that cannot be."""


class ProfileError(FileError):
    """A profile file describes something that cannot be."""


class CheckpointError(FileError):
    """A checkpoint cannot be written, or cannot be read as one."""


class ModelError(IsthmusError):
    """A model cannot be found, built or captured."""


class DataError(IsthmusError):
    """Samples or a loss cannot be found, or do not fit the model."""


class PlanError(IsthmusError):
    """A plan breaks a rule; `rule` is the rule's short name."""

    def __init__(self, rule: str, what: str, **parts: str | None) -> None:
        self.rule = rule
        super().__init__(what, **parts)

    def as_dict(self) -> dict[str, Any]:
        """Return the parts that are set, and the rule."""
        return {"rule": self.rule, **super().as_dict()}


class RunError(IsthmusError):
    """A run ended because a worker failed (`where` names it, its stages and the step), or cannot start here."""


class NoPlanError(IsthmusError):
    """No plan fits the cluster; the text says how many bytes are missing where."""


class NoPlanYetError(NoPlanError):
    """No plan that fits was found before the budget ended the search; a larger one may find it."""
