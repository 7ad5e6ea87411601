"""`isthmus emulate`: a command on every host, what it is told, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isthmus.cli.emulate import TimedLinkChange, parse_change
from isthmus.errors import UsageError
from tests.cli.conftest import Isthmus
from tests.emulate.marks import shaped
from tests.emulate.test_world import namespaces_of, wait_until
from tests.quiet import PATIENCE, needs_quiet

SAYS = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR, $GLOO_SOCKET_IFNAME $TP_SOCKET_IFNAME; echo oh >&2; exit $RANK"
DUEL = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), "on", os.environ["ISTHMUS_HOST"])
dist.destroy_process_group()
"""


@pytest.fixture
def demo(root: Path) -> Path:
    return root / "examples" / "clusters" / "demo.yaml"


@shaped
def test_every_host_runs_the_command(isthmus: Isthmus, demo: Path) -> None:
    done = isthmus("emulate", demo, "--on", "oslo2", "lima1", "--", "sh", "-c", SAYS)
    assert done.code == 1 and "isthmus: failed: lima1 (exit code 1)" in done.err
    assert "oslo2 | 0 of 2 at 10.77.0.1, wan0 wan0\n" in done.out
    assert "lima1 | 1 of 2 at 10.77.0.1, wan0 wan0\n" in done.out and "lima1 | oh\n" in done.err
    assert "what a host sends to itself is not slowed down" in done.err and not namespaces_of(os.getpid())


@shaped
def test_as_json_standard_output_is_one_object(isthmus: Isthmus, demo: Path) -> None:
    done = isthmus("emulate", demo, "--json", "--", "sh", "-c", "echo --json; kill -9 $$")
    assert done.code == 1 and done.values["shaped"] is True and 0 < done.values["seconds"] < PATIENCE
    hosts = done.values["hosts"]
    assert list(hosts) == ["oslo1", "oslo2", "lima1", "lima2"]
    assert hosts["lima2"] == {"exit_code": -9, "address": "10.77.0.4"}
    assert "oslo1 | --json" in done.err and "lima2 (killed (SIGKILL))" in done.err


@pytest.mark.slow("starts two processes that import torch")
@shaped
def test_torch_distributed_runs_unmodified(isthmus: Isthmus, demo: Path, tmp_path: Path) -> None:
    script = tmp_path / "duel.py"
    script.write_text(DUEL)
    done = isthmus("emulate", demo, "--on", "oslo1", "lima1", "--", sys.executable, script)
    assert done.code == 0, done.err
    assert "oslo1 | sum 3.0 on oslo1" in done.out and "lima1 | sum 3.0 on lima1" in done.out


def test_on_loopback_it_says_what_is_not_shaped(isthmus: Isthmus, demo: Path) -> None:
    done = isthmus("emulate", demo, "--unshaped", "--json", "--", "sh", "-c", "echo $MASTER_ADDR $MASTER_PORT")
    assert done.code == 0 and done.values["shaped"] is False
    assert all(host == {"exit_code": 0, "address": "127.0.0.1"} for host in done.values["hosts"].values())
    assert "nothing of the cluster's network is emulated" in done.err
    (port,) = {line.split()[-1] for line in done.err.splitlines() if " | 127.0.0.1 " in line}
    assert int(port) > 1024


@shaped
@needs_quiet()
def test_links_change_at_their_time(isthmus: Isthmus, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ping = (
        "import os, socket, time\n"
        "talk = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "talk.bind(('', 7000)); talk.settimeout(0.2)\n"
        "if os.environ['RANK'] == '0':\n"
        "    while time.monotonic() < float(os.environ['END']):\n"
        "        try: talk.sendto(*talk.recvfrom(9))\n"
        "        except TimeoutError: pass\n"
        "else:\n"
        "    while time.monotonic() < float(os.environ['END']):\n"
        "        talk.sendto(b'.', (os.environ['MASTER_ADDR'], 7000))\n"
        "        try: talk.recv(9); print('.', end='')\n"
        "        except TimeoutError: print('x', end='')\n"
    )
    monkeypatch.setenv("END", str(time.monotonic() + 1.6))
    changes = ("--change", "0.5 s oslo lima cut", "--change", "1.1 s oslo lima mend")
    done = isthmus("emulate", demo, "--on", "oslo1", "lima1", *changes, "--", sys.executable, "-c", ping)
    assert done.code == 0, done.err
    (seen,) = [line.partition("| ")[2] for line in done.out.splitlines() if line.startswith("lima1 | ")]
    assert re.fullmatch(r"x*\.+x{2,}\.+x?", seen), seen  # the other may begin later, and end sooner


@shaped
@pytest.mark.parametrize(("order", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_and_removes_the_world(demo: Path, order: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "isthmus.cli.main", "emulate", str(demo), "--", "sh", "-c", "echo $$; sleep 100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().rpartition(" ")[2]) for _ in range(4)]
        assert namespaces_of(process.pid)
        process.send_signal(order)
        assert process.wait(timeout=PATIENCE) == code
        assert not namespaces_of(process.pid) and wait_until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)
        )


def test_on_loopback_nothing_that_commands_leave_stays(isthmus: Isthmus, demo: Path) -> None:
    done = isthmus(
        "emulate",
        demo,
        "--unshaped",
        "--on",
        "oslo1",
        "lima2",
        "--",
        "sh",
        "-c",
        "sleep 100 >&- 2>&- & echo $!; kill -9 $$",
    )
    left = [int(line.rpartition(" ")[2]) for line in done.out.splitlines() if " | " in line]
    assert len(left) == 2 and "lima2 (killed (SIGKILL))" in done.err
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


@pytest.mark.parametrize("orders", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT]])
def test_on_loopback_commands_end_with_a_killed_parent_or_at_the_second_interrupt(
    demo: Path, orders: list[signal.Signals]
) -> None:
    command = [sys.executable, "-m", "isthmus.cli.main", "emulate", str(demo), "--unshaped", "--on", "oslo1", "lima1"]
    command += ["--", "sh", "-c", "trap '' TERM INT; echo $$; sleep 1000; sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().rpartition(" ")[2]) for _ in range(2)]
        for order in orders:
            time.sleep(0.2)
            process.send_signal(order)
        process.wait(timeout=PATIENCE)
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10 s virginia frankfurt bandwidth=100 Mbit/s", (10.0, {"bandwidth": 12.5e6})),
        ("0.5s a b latency=80 ms loss=0.01", (0.5, {"latency": 0.08, "loss": 0.01})),
        ("2 min va1 fra cut", (120.0, {"cut": True})),
        (" 1 s a b  mend ", (1.0, {})),
    ],
)
def test_changes_are_read(text: str, expected: tuple[float, dict[str, float]]) -> None:
    change = parse_change(text)
    assert isinstance(change, TimedLinkChange) and (change.at, change.values) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10 virginia frankfurt cut", "AT A B WHAT"),
        ("10 s virginia cut", "AT A B WHAT"),
        ("10 s a b burn", "bandwidth=, latency=, loss=, cut or mend"),
        ("10 s a b bandwidth=100", "a number with its unit"),
        ("10 s a b loss=2", "0 to 1"),
        ("10 s a b bandwidth=0 bit/s", "above 0"),
    ],
)
def test_changes_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_change(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "oslo1"), "no command to run"),
        (("--on", "oslo9", "--", "true"), "no host 'oslo9' in demo"),
        (("--unshaped", "--change", "1 s oslo lima cut", "--", "true"), "--change needs emulated links"),
        (("--chnge", "--", "true"), "Did you mean '--change'?"),
        (("true",), "Found 'true'"),
        (("--", "no-such-command"), "no command 'no-such-command' on this machine"),
        pytest.param(("--change", "1 s oslo rome cut", "--", "true"), "no host or region 'rome'", marks=shaped),
    ],
)
def test_wrong_words_are_said_before_anything_runs(
    isthmus: Isthmus, demo: Path, words: tuple[str, ...], said: str
) -> None:
    done = isthmus("emulate", demo, *words)
    assert done.code == 2 and said in done.err and not done.out
