"""Nasty files that are too large to keep: each is made when it is needed, and only read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tests.fuzz.kinds import sign
from tests.plan.small_models import chain

__all__ = ["GENERATED", "Generated"]

_CLUSTER = b"kind: cluster\nversion: 1\nname: c\n"
_JOB = b"kind: job\nversion: 1\nname: j\nbatch: 8\nmodel: "
_PLAN = b'{"kind": "plan", "version": 1, '
_MODEL = b'{"kind": "model", "version": 1, '
_PROFILE = b'{"kind": "profile", "version": 1, "blocks": ['
_DEEP = 100_000
_HUGE = 100_000_000  # bytes


class Generated(NamedTuple):
    """A kind of file, its bytes, how reading it must end, and what the error says."""

    kind: str
    data: Callable[[], bytes]
    ends: str = "FileError"
    says: str = ""


def _hosts(count: int, between: bytes = b"") -> bytes:
    lines = (b"  h%d: {region: r%d, devices: {T4: 8}}\n" % (number, number % 9) for number in range(count))
    return _CLUSTER + b"hosts:\n" + b"".join(lines) + between


def _bomb() -> bytes:
    """Each list holds the one before a hundred times: 100^20 words if anyone wrote them out."""
    lines = (b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 100)) for n in range(1, 20))
    return b"a0: &a0 [x, x, x]\n" + b"".join(lines)


def _many_jobs() -> bytes:
    jobs = (b"  - {name: j%d, model: 'zoo:gpt2', batch: 8}\n" % number for number in range(2000))
    return b"kind: workload\nversion: 1\nname: w\njobs:\n" + b"".join(jobs)


def _long_model() -> bytes:
    plain = {"kind": "model", "version": 1, "graph": msgspec.to_builtins(chain(2000))}
    return msgspec.json.encode(sign(plain))


def _points(count: int) -> bytes:
    point = b'{"block":"b","device":"T4","precision":"fp32","samples":%d,"forward_seconds":1,"backward_seconds":1}'
    return _PROFILE + b",".join(point % number for number in range(1, count + 1)) + b"]}"


def _keys(count: int) -> bytes:
    return b",".join(b'"k%d":%d' % (number, number) for number in range(count))


GENERATED = {
    "alias-bomb": Generated("cluster", _bomb, "ClusterError", "anchors"),
    "depth-of-brackets": Generated("cluster", lambda: b"[" * _DEEP, "ClusterError", "too deeply"),
    "depth-of-braces": Generated("cluster", lambda: b"{a: " * _DEEP, "ClusterError", "too deeply"),
    "depth-of-dashes": Generated("cluster", lambda: b"- " * _DEEP, "ClusterError", "too deeply"),
    "depth-of-keys": Generated("cluster", lambda: b"? " * _DEEP, "ClusterError", "cannot be a key"),
    "huge-scalar": Generated("cluster", lambda: b"name: " + b"x" * _HUGE, "ClusterError", "too large"),
    "large-scalar": Generated("cluster", lambda: b"name: " + b"x" * 16_000_000, "ClusterError", "kind"),
    "long-name": Generated("cluster", lambda: _CLUSTER + b"hosts: {}\n? " + b"x" * 10**6 + b"\n: 1", "ClusterError"),
    "many-comments": Generated("cluster", lambda: b"# x\n" * 10**6, "ClusterError", "empty"),
    "many-spaces": Generated("cluster", lambda: b"a:" + b" " * 10**7 + b"b", "ClusterError", "kind"),
    "many-documents": Generated("cluster", lambda: b"--- a\n" * _DEEP, "ClusterError", "several documents"),
    "many-values": Generated("cluster", lambda: b"a: [" + b"1," * 10**6 + b"]", "ClusterError", "too many values"),
    "ten-thousand-hosts": Generated("cluster", lambda: _hosts(10_000), "valid"),
    "ten-thousand-hosts-and-a-fault": Generated(
        "cluster", lambda: _hosts(10_000, b"  z: {region: r, devices: {T4: x}}\n"), "ClusterError", "hosts.z.devices.T4"
    ),
    "hosts-by-pattern": Generated(
        "cluster", lambda: _CLUSTER + b'hosts: {"h[1-20000]": {region: r, devices: {T4: 2}}}', "valid"
    ),
    "hosts-with-long-names": Generated(
        "cluster",
        lambda: _CLUSTER + b'hosts: {"' + b"h" * 800 + b'[0-999999]": {region: r, devices: {T4: 1}}}',
        "ClusterError",
        "pattern",
    ),
    "long-model-name": Generated("job", lambda: _JOB + b"x" * 10**6, "JobError", "model has an impossible value"),
    "many-places": Generated(
        "job",
        lambda: _JOB + b"zoo:gpt2\nplace: {" + b",".join(b"b%d: r" % n for n in range(20_000)) + b"}",
        "valid",
    ),
    "two-thousand-jobs": Generated("workload", _many_jobs, "valid"),
    "depth-of-lists": Generated("plan", lambda: b"[" * _DEEP, says="too deeply"),
    "depth-of-objects": Generated("plan", lambda: b'{"a":' * _DEEP, says="too deeply"),
    "huge-string": Generated("plan", lambda: _PLAN + b'"planner": "' + b"x" * _HUGE + b'"}', says="too large"),
    "large-string": Generated("plan", lambda: b'{"planner": "' + b"x" * 60_000_000 + b'"}', says="kind"),
    "a-key-twice-among-many": Generated("plan", lambda: b"{" + _keys(_DEEP) + b',"k99999":0}', says="given twice"),
    "many-unknown-fields": Generated("plan", lambda: _PLAN + _keys(_DEEP) + b"}", says="unknown field"),
    "large-word": Generated("plan-text", lambda: b"plan for a\n" + b"x" * 10**7, "PlanError", "line 2"),
    "many-lines": Generated("plan-text", lambda: b"plan for a\n" + b"via a - b over c\n" * 20_000, "PlanError", "plan"),
    "many-words": Generated("plan-text", lambda: b"plan for a\nvia a - b over " + b"c " * 300_000, "PlanError", "plan"),
    "many-backslashes": Generated("plan-text", lambda: b'plan for "' + b"\\" * 10**6, "PlanError", "line 1"),
    "depth-of-indents": Generated(
        "plan-text", lambda: b"".join(b"  " * n + b"a\n" for n in range(2000)), "PlanError", "line 1"
    ),
    "depth-of-graphs": Generated("model", lambda: _MODEL + b'"graph":' + b'{"a":' * _DEEP, says="too deeply"),
    "two-thousand-blocks": Generated("model", _long_model, "valid"),
    "depth-of-points": Generated("profile", lambda: _PROFILE + b"[" * _DEEP, "ProfileError", "too deeply"),
    "twenty-thousand-points": Generated("profile", lambda: _points(20_000), "valid"),
    "a-point-twice-among-many": Generated(
        "profile", lambda: _points(20_000).replace(b'"samples":7,', b'"samples":9,'), "ProfileError", "at blocks[6]"
    ),
    "too-many-points": Generated("profile", lambda: _points(200_000), "ProfileError", "too large"),
}
