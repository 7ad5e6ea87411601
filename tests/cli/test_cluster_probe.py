"""`cluster probe`: in an emulated world, at a meeting point, interrupted, and used wrongly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.cli import cluster_probe
from isthmus.cluster.load import load_cluster
from isthmus.deploy.probing import sync_times as collectives
from isthmus.emulate import namespaces
from isthmus.model.load_profile import load_profile
from tests.cli.conftest import Isthmus
from tests.quiet import PATIENCE, needs_quiet

FILE = """
kind: cluster
version: 1
name: three
hosts:
  h1: {region: a, devices: {T4: 1}, address: 127.0.0.1}
  h2: {region: a, devices: {T4: 1}, address: 127.0.0.2}
  h3: {region: b, devices: {T4: 1}}
links:
  - {between: [a, a], bandwidth: 200 Mbit/s, latency: 3 ms}
"""
TOKEN = "0123456789abcdef0123"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "three.yaml"
    path.write_text(FILE)
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def running(*words: object, token: str = TOKEN) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, which is gone afterwards."""
    argv = [sys.executable, "-m", "isthmus.cli.main", *map(str, words)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "ISTHMUS_TOKEN": token})
    with process:
        try:
            yield process
        finally:
            process.kill()


@needs_quiet()
def test_unshaped_it_says_that_it_measures_loopback(
    isthmus: Isthmus, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "missing", lambda: "emulated links need root")
    output = tmp_path / "out.yaml"
    done = isthmus("cluster", "probe", file, "--emulate", "--seconds", "0.1", "-o", output)
    assert done.code == 0 and "only this machine's loopback was measured, not these links" in done.out
    assert "only this machine's loopback was measured" in output.read_text() and "need root" in output.read_text()
    assert "Measuring pairs, round 1 of 1: h1 - h2" in done.err and str(output) in done.out
    link = load_cluster(output).link("h1", "h2")
    assert link is not None and link.bandwidth > 400e6 / 8, "and not 200 Mbit/s"


@pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))
@needs_quiet()
def test_emulated(isthmus: Isthmus, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = isthmus("cluster", "probe", file, "--emulate", "--seconds", "0.1", "--json")
    assert done.code == 0 and set(done.values) >= {"file", "pairs", "seconds"}
    assert done.values["file"] == "three.probed.yaml" and 0.3 < done.values["seconds"] < PATIENCE
    (pair,) = done.values["pairs"]
    assert (pair["a"], pair["b"]) == ("h1", "h2") and pair["latency"] == pytest.approx(3e-3, rel=0.1)
    assert pair["bandwidth"] == pytest.approx([200e6 / 8] * 2, rel=0.05)
    assert done.values["not_measured"] == [{"a": a, "b": "h3", "why": "not tried"} for a in ("h1", "h2")]
    measured = load_cluster("three.probed.yaml")
    assert measured.hosts == load_cluster(file).hosts and measured.link("h1", "h3") is None


@pytest.mark.slow("a probe of real processes; `test_emulated` is one of the fast set")
@needs_quiet()
def test_hosts_meet(isthmus: Isthmus, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """h3 has another token and is refused: the others are measured, all-reduces too, and that it is not all is said."""
    monkeypatch.delenv("ISTHMUS_TOKEN", raising=False)
    monkeypatch.setattr(collectives, "SIZES", collectives.SIZES[:2])
    token, output, meet = tmp_path / "token", tmp_path / "out.yaml", f"127.0.0.1:{free_port()}"
    token.write_text(f"{TOKEN}\n")
    common = ("cluster", "probe", file, "--meet", meet, "--wait", 6, "--seconds", "0.1", "--json")
    with running(*common, "--host", "h2") as other, running(*common, "--host", "h3", token=TOKEN[::-1]) as stranger:
        reduced = tmp_path / "reduced.json"
        own = ("--host", "h1", "--token-file", token, "-o", output, "--collectives", reduced)
        done = isthmus(*common, *own, "--among", "h1,h2", "--among", "h3,h2")
        out, err = other.communicate(timeout=PATIENCE)
        _, refused = stranger.communicate(timeout=PATIENCE)
    assert stranger.returncode == 1 and "the meeting point refuses: the token is not the one" in refused
    assert "Refused a connection: it does not know the token" in done.err
    assert other.returncode == 0 and '"file": null' in out and "takes part in the probe that h1 leads" in err
    assert (
        done.code == 1
        and "not everything was measured: h3 did not come" in done.err
        and "h2 is here: 2 of 3" in done.err
    )
    assert [(pair["a"], pair["b"]) for pair in done.values["pairs"]] == [("h1", "h2")]
    assert load_cluster(output).link("h1", "h2") != load_cluster(file).link("h1", "h2")
    assert (
        done.values["collectives"] == str(reduced) and "Measuring all-reduces, 3 of 3: server among h1, h2" in done.err
    )
    points = load_profile(reduced).collectives
    assert {(point.how, point.hosts) for point in points} == {(how, ("h1", "h2")) for how in collectives.HOW}
    assert len(points) == 6 and all(1e-5 < point.seconds < 2.0 for point in points)


def test_interrupted(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.yaml"
    with running("cluster", "probe", file, "--emulate", "--seconds", 60, "-o", output) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "round 1" in line:
                break
        probers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and err.strip() == "isthmus: interrupted" and not output.exists()
    assert len(probers) >= 3 and not [pid for pid in probers if Path(f"/proc/{pid}").exists()]


def test_links_are_kept_when_all_reduces_are_interrupted(
    isthmus: Isthmus, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(namespaces, "missing", lambda: "emulated links need root")
    monkeypatch.setattr(cluster_probe, "collectives", interrupted)
    output = tmp_path / "out.yaml"
    words = ("--emulate", "--seconds", "0.1", "-o", output, "--collectives", tmp_path / "p.json")
    assert isthmus("cluster", "probe", file, *words).code == 130
    assert load_cluster(output).link("h1", "h2") != load_cluster(file).link("h1", "h2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Expected --emulate, or --host NAME and --meet"),
        (("--emulate", "--host", "h1"), "Expected --emulate, or --host NAME and --meet"),
        (("--host", "h1"), "--meet is missing"),
        (("--meet", "127.0.0.1:1"), "--host is missing"),
        (("--host", "h11", "--meet", "127.0.0.1:1"), "no host of the cluster is named 'h11'. Did you mean 'h1'?"),
        (("--host", "h1", "--meet", "127.0.0.1"), "Expected an address and a port"),
        (("--host", "h1", "--meet", "127.0.0.1:70000"), "Expected an address and a port"),
        (("--host", "h2", "--meet", "127.0.0.1:1"), "a token is needed"),
        (("--host", "h3", "--meet", "0.0.0.0:29400"), "--meet names no address that others could reach"),
        (("--emulate", "--seconds", "0"), "Expected 0.1 to 60"),
        (("--emulate", "--second", "1"), "Did you mean '--seconds'?"),
        (("--emulate", "--among", "h1,h2"), "Add --collectives PROFILE.json"),
        (("--emulate", "--collectives", "p.json", "--among", "h1,h4"), "--among: no host of the cluster is named 'h4'"),
        (("--emulate", "--collectives", "p.json", "--among", "h1"), "--among needs two participants. Found 'h1'"),
    ],
)
def test_wrong_usage(
    isthmus: Isthmus, file: Path, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_TOKEN", "" if "token" in said else TOKEN)
    done = isthmus("cluster", "probe", file, *words)
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) == 1, done.err


def test_a_token_is_read_from_a_plain_file_only(isthmus: Isthmus, file: Path, tmp_path: Path) -> None:
    """A pipe would wait for its writer."""
    os.mkfifo(tmp_path / "pipe")
    done = isthmus("cluster", "probe", file, "--host", "h2", "--meet", "127.0.0.1:1", "--token-file", tmp_path / "pipe")
    assert done.code == 1 and "cannot read the token: this is a pipe" in done.err


def test_what_cannot_be(isthmus: Isthmus, file: Path, box: Path, tmp_path: Path) -> None:
    assert "the folder does not exist" in isthmus("cluster", "probe", file, "--emulate", "-o", "no/x.yaml").err
    words = ("cluster", "probe", file, "--emulate", "--collectives", "no/p.json")
    assert "no/p.json: the folder does not exist" in isthmus(*words).err
    assert "no link to measure" in isthmus("cluster", "probe", box, "--emulate").err
    words = ("cluster", "probe", file, "--host", "h2", "--meet", "127.0.0.1:1")
    assert "cannot read the token" in isthmus(*words, "--token-file", tmp_path / "none").err
    (tmp_path / "short").write_text("abc")
    assert "Found 3 characters" in isthmus(*words, "--token-file", tmp_path / "short").err
    (tmp_path / "good").write_text(TOKEN)
    away = isthmus(*words, "--token-file", tmp_path / "good", "--wait", "0")
    assert away.code == 1 and "the meeting point cannot be reached" in away.err
