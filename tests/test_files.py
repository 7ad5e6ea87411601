"""Strict files: what is refused and where, against JSON, the pure YAML parser and a brute search for the line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.errors import ClusterError, FileError, JobError
from isthmus.files import Document, encode_json, parse_json, parse_yaml, read_json, read_yaml, strict_yaml, write_json
from isthmus.model.load_job import parse_jobs

Rate = Annotated[str, msgspec.Meta(examples=["25 Gbit/s"])]


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: Rate | None = None
    count: int = 1
    pair: tuple[str, str] = ("a", "b")
    rates: dict[Literal["fp32", "bf16"], Rate] = {}
    mode: Literal["ring", "tree"] = "ring"
    flag: bool = False


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    items: dict[str, Item] = {}
    list: tuple[Item, ...] = ()
    marks: frozenset[str] = frozenset()


@pytest.fixture(params=["libyaml", "pure"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both parsers that PyYAML may come with."""
    if request.param == "pure":
        monkeypatch.setattr(strict_yaml, "_LOADER", yaml.SafeLoader)
    yield


REFUSED = [
    ("a: 1\nb: yes", 2, "bare yes"),
    ("a: [on]", 1, "bare on"),
    ("a: 1\nno: 1", 2, "bare no"),
    ("Y: 1", 1, "bare Y"),
    ("a: 010", 1, "eight-based"),
    ("a: 0x1f", 1, "to some readers"),
    ("a: 1_000", 1, "to some readers"),
    ("\na: 22:22", 2, "sixty-based"),
    ("a: -190:20:30", 1, "sixty-based"),
    ("a: .nan", 1, "finite"),
    ("a: -.INF", 1, "finite"),
    ("a: 1e999", 1, "out of range"),
    ("a: 9223372036854775808", 1, "out of range"),
    ("a: " + "9" * 5000, 1, "out of range"),
    ("a:\nb: 1", None, "missing"),
    ("a: 1\nb: 2\na: 3", 3, "'a' is given twice. Found it on line 1"),
    ("1: 2", 1, "key must be text"),
    ("true: 2", 1, "key must be text"),
    ("null: 2", 1, "key must be text"),
    ("? [a]\n: 1", 1, "cannot be a key"),
    ("a: &x 1", 1, "anchors"),
    ("a: 1\nb: *x", 2, "aliases"),
    ("a: !!python/object/apply:os.system [ls]", 1, "tags"),
    ("a: !!int 3", 1, "tags"),
    ("ü: 1\nb: ! x", 2, "tags"),
    ("<<: {a: 1}", 1, "merge"),
    ("a: 1\n---\nb: 1", None, "several documents"),
    ("%YAML 1.1\n---\na: 1", None, "directives"),
    ("a: [1,\n  2", None, "not YAML"),
    ("a: 1\n\tb: 2", 2, "spaces, not tabs"),
    ("a: 1\nb: \x01", 2, "not YAML"),
    ("a: " + "[" * 40 + "]" * 40, 1, "too deeply"),
    ("[" * 100_000, 1, "too deeply"),
    ('a: "\\0"', 1, "NUL"),
    ("a: \0", None, "NUL"),
    ("", None, "empty"),
    ("# only a comment\n", None, "empty"),
]


@pytest.mark.parametrize(("text", "line", "reason"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.usefixtures("parser")
def test_yaml_refusals_name_the_line(text: str, line: int | None, reason: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_yaml(text, name="f.yaml", error=ClusterError)
    assert reason in str(caught.value)
    assert (caught.value.where or "").startswith("f.yaml")
    if line is not None:
        assert caught.value.where == f"f.yaml line {line}"


@pytest.mark.usefixtures("parser")
def test_plain_scalars_mean_what_yaml_1_2_says() -> None:
    text = """
        {i: -2, f: 3e-4, g: +.5e3, h: 1., z: 0, t: True, u: false, k: ~, m: null, q: "yes", o: '010', v: 1.2.3,
         d: 2024-01-01, s: 40 GB, w: nope, e: "", x: http://a:80, b: 12e, nan: nan, i6: "::1", eq: =}
    """
    value = parse_yaml(text, name="f").value
    expected: dict[str, Any] = {"i": -2, "f": 3e-4, "g": 500.0, "h": 1.0, "z": 0, "t": True, "u": False, "k": None}
    expected |= {"m": None, "q": "yes", "o": "010", "v": "1.2.3", "d": "2024-01-01", "s": "40 GB", "w": "nope", "e": ""}
    expected |= {"x": "http://a:80", "b": "12e", "nan": "nan", "i6": "::1", "eq": "="}
    assert value == expected
    assert {key: type(item) for key, item in value.items()} == {key: type(item) for key, item in expected.items()}


LETTERS = st.characters(exclude_categories=("Cc", "Cs", "Co", "Cn", "Zl", "Zp"), exclude_characters="\ufeff")
WORDS = st.text(LETTERS | st.sampled_from('\n\t"\\:#&*!'), max_size=6)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_every_json_value_reads_the_same_as_yaml_and_as_json(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert parse_yaml(text, name="f").value == value
    assert parse_json(text, name="f").value == value
    assert parse_json(encode_json(value).decode(), name="f").value == value


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
@settings(max_examples=150)
def test_random_bytes_give_a_document_or_our_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random"
    path.write_bytes(data)
    for read in (read_yaml, lambda path: read_json(path, Any)):
        try:
            read(path)
        except FileError as problem:
            assert (problem.where or "").startswith(str(path))


SAMPLE = """kind: sample
version: 1
name: x
items:
  one: {rate: 1 Gbit/s}
  two:
    count: 2
    rate: 5 Gbit/s
list:
  - {count: 3}
  - count: 4
    rates: {fp32: 1 TFLOP/s}
"""


def sample(old: str, new: str) -> Sample:
    assert old in SAMPLE
    document = parse_yaml(SAMPLE.replace(old, new), name="s.yaml")
    document.check("sample")
    return document.convert(Sample)


def test_a_good_file_becomes_typed() -> None:
    good = sample("name: x", "name: xx")
    assert good.name == "xx" and good.items["two"].count == 2 and good.list[1].rates == {"fp32": "1 TFLOP/s"}


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("rate: 5 Gbit/s", "rate: 5", "line 8: items.two.rate lacks its unit. Found 5. Expected like 25 Gbit/s."),
        ("rate: 5", "rat: 5", "line 8: items.two has an unknown field 'rat'. Expected only rate, count, pair, rates"),
        ("rate: 5", "rat: 5", "Did you mean 'rate' or 'rates'?"),
        ("count: 2", "count: two", "line 7: items.two.count has a wrong value. Found 'two'. Expected a whole number."),
        ("count: 2", "count: true", "line 7: items.two.count has a wrong value. Found true."),
        (
            "count: 3",
            "pair: [a]",
            "line 10: list[0].pair has a wrong value. Found a list of 1. Expected a list of 2.",
        ),
        ("count: 3", "pair: a", "line 10: list[0].pair has a wrong value. Found 'a'. Expected a list of 2."),
        ("count: 3", "mode: rnig", "Expected one of ring, tree. Did you mean 'ring'?"),
        ("count: 3", "flag: 1", "Expected true or false."),
        (
            "fp32:",
            "fp31:",
            "line 12: list[1].rates has an unknown key 'fp31'. Expected one of bf16, fp32. Did you mean",
        ),
        ("1 TFLOP/s", "1.5", "line 12: list[1].rates.fp32 lacks its unit."),
        ("name: x\n", "", "line 1: the file lacks the field 'name'. Expected text."),
        ("name: x", "name: 7", 'line 3: name has a wrong value. Found 7. Expected text. Quote it: "7".'),
        ("name: x", "name: {}", "line 3: name has a wrong value. Found a map. Expected text."),
        ("  - {count: 3}", "  - 3", "line 10: list[0] has a wrong value. Found 3. Expected a map."),
    ],
)
def test_conversion_errors_name_line_and_remedy(old: str, new: str, text: str) -> None:
    with pytest.raises(FileError) as caught:
        sample(old, new)
    assert text in str(caught.value)


@given(st.integers(1, 60), st.data())
@settings(max_examples=40)
def test_the_culprit_among_many_keys_is_found(count: int, data: st.DataObject) -> None:
    wrong = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=3)))
    lines = [f"  h{index}: {{count: {'x' if index in wrong else 1}}}" for index in range(count)]
    document = parse_yaml("\n".join(["name: x", "items:", *lines]), name="s")
    with pytest.raises(FileError) as caught:
        document.convert(Sample)
    assert caught.value.where == f"s line {wrong[0] + 3}"


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (
            "kind: job\nversion: 1",
            "line 1: this is the wrong kind of file. Found a job file. Expected a cluster file (YAML with kind: "
            "cluster). For a job file use: isthmus plan FILE --cluster CLUSTER",
        ),
        ("kind: 3\nversion: 1", "Known kinds: cluster, job"),
        ("version: 1", "does not say its kind. Expected kind: cluster"),
        ("kind: cluster", "does not say its version. Expected version: 1"),
        (
            "kind: cluster\nversion: 2",
            "line 2: the file is newer than this program. Found version 2. Expected version 1",
        ),
        ("kind: cluster\nversion: true", "line 2: version is not a version number"),
        ("kind: cluster\nversion: 0", "line 2: version is not a version number"),
        ("[kind, cluster]", "not a cluster file. Found a list of 2"),
    ],
)
def test_kind_and_version_come_first(head: str, text: str) -> None:
    document = parse_yaml(head, name="f")
    with pytest.raises(FileError) as caught:
        document.check("cluster")
    assert text in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read the file: No such file"):
        read_yaml(tmp_path / "absent")
    with pytest.raises(FileError, match="cannot read the file"):
        read_yaml(tmp_path)
    (tmp_path / "latin").write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(FileError, match=r"latin line 2: the file is not UTF-8 text. Found byte 0xe9"):
        read_yaml(tmp_path / "latin")
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert read_yaml(tmp_path / "bom").value == {"a": 1, "b": 2}
    with (tmp_path / "large").open("wb") as file:
        file.truncate(16 * 2**20 + 1)
    with pytest.raises(FileError, match="too large"):
        read_yaml(tmp_path / "large")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' is given twice"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "Infinity is not a JSON number"),
        ('{"a": [1e999]}', "f.json at a[0]: a number is out of range"),
        ("[" * 70 + "]" * 70, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1,\n "b" 2}', "f.json line 2 column 6: this is not JSON"),
        ('"\\ud800"', "surrogate"),
        ("9" * 5000, "too many digits"),
        ("{'a': 1}", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_json_refusals(text: str, reason: str) -> None:
    with pytest.raises(FileError) as caught:
        parse_json(text, name="f.json")
    assert reason in str(caught.value) and (caught.value.where or "").startswith("f.json")


def test_json_conversion_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(
        '{"kind": "s", "version": 1, "name": "x", "items": {"a": {}, "b": {"count": "x"}}}'
    )
    with pytest.raises(FileError, match=r"s\.json at items\.b\.count: items\.b\.count has a wrong value"):
        read_json(tmp_path / "s.json", Sample, kind="s")
    with pytest.raises(FileError, match="Expected a plan"):
        read_json(tmp_path / "s.json", Sample, kind="plan")


def test_json_round_trip_keeps_order_and_sorts_sets(tmp_path: Path) -> None:
    value = Sample(name="x", items={"z": Item(), "a": Item(count=2)}, marks=frozenset({"w", "e", "q", "r"}))
    path = tmp_path / "s.json"
    write_json(path, value)
    again = read_json(path, Sample)
    assert again == value and list(again.items) == ["z", "a"]
    assert json.loads(path.read_text())["marks"] == ["e", "q", "r", "w"]
    assert path.read_text().startswith('{\n  "name": "x",\n') and [file.name for file in tmp_path.iterdir()] == [
        "s.json"
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_does_not_write_what_it_does_not_read(tmp_path: Path, value: float) -> None:
    path = tmp_path / "s.json"
    write_json(path, {"a": 1})
    with pytest.raises(FileError, match=r"s\.json at a\[0\]: JSON has no such number"):
        write_json(path, {"a": [value]})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(FileError, match="cannot write the file"):
        write_json(tmp_path / "absent" / "s.json", {})
    assert [file.name for file in tmp_path.iterdir()] == ["s.json"]


def test_a_document_without_lines_says_the_path() -> None:
    assert Document(name="p.json", value={}).where(("a", 2, "b")) == "p.json at a[2].b"


def test_every_fault_of_a_cluster_file_is_told_in_one_run() -> None:
    """Line by line as they were put in; what only follows from another fault is not told."""
    text = """kind: cluster
version: 1
name: bad
devices:
  lab: {compute: 35 TFLOP/s, memory: 24 GB}
hosts:
  a: {region: r, devices: {A100: 1}, nic: 10, bus: 12 GB/sec, colour: red}
  b: {region: r, devices: {lab: 1, T4: 0}, cores: -3}
  c: {region: s}
  d: {region: s, devices: {T4: 1}}
links:
  - {between: [r, s], bandwidth: fast, latency: 10 ms}
  - {between: [r, r], latency: 1 ms}
  - {between: [d], bandwidth: 1 Gbit/s, latency: 1 ms}
  - {between: [r, r], bandwidth: 0 Gbit/s, latency: 1 ms}
"""
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    lines = str(caught.value).splitlines()
    assert [int(line.split()[2].rstrip(":")) for line in lines] == [5, 7, 7, 7, 7, 8, 8, 9, 12, 13, 14, 15, 15], lines
    assert len(caught.value.as_dict()["others"]) == 12
    for part in ("'colour'", "lacks its unit", "Did you mean 'A100-40GB' or 'A100-80GB'", "lacks the field 'devices'"):
        assert sum(part in line for line in lines) == 1


LEFTOVERS = """kind: cluster
version: 1
name: leftovers
devices:
  card: {compute: 35, memory: 24 GB}
hosts:
  office1: {region: office, devices: {A100: 1}, nic: {upload: 20 mbps, download: 100 Mbps}}
  lab: {region: lab, devices: {RTX3090: 4}, memory: 128}
  lab2: {region: lab, devices: 4}
  lab3:
    region: lab
    devices: [RTX-3090]
  home: {region: home, devices: {}}
links:
  - {between: [office, lab], bandwidth: 1 Gb, latency: 2}
  - {between: [lab, hme], bandwith: 20 Mbit, latency: 15 ms}
  - {between: [office, home], latency: 15}
  - {between: [office, office], bandwidth: 1 gbps, latency: 15 us}
"""


def test_no_fault_hides_another_and_all_are_told_by_line() -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(LEFTOVERS)
    faults = [caught.value, *caught.value.others]
    told = [(int((fault.where or "").split()[-1]), f"{fault.what}. {fault.next or ''}") for fault in faults]
    expected = [
        (5, "devices.card.compute lacks its unit"),
        (5, "lacks memory_bandwidth"),
        (7, "unknown field 'upload'. Did you mean 'up'?"),
        (7, "unknown field 'download'. Did you mean 'down'?"),
        (7, "unknown device kind 'A100'"),
        (7, "hosts.office1.nic.up is not a quantity. Did you mean 20 Mbps?"),
        (8, "hosts.lab.memory lacks its unit"),
        (8, "unknown device kind 'RTX3090'"),
        (8, "'lab' names both a host and a region"),
        (9, "hosts.lab2.devices has a wrong value"),
        (12, "hosts.lab3.devices has a wrong value"),
        (13, "'home' names both a host and a region"),
        (15, "links[0].latency lacks its unit"),
        (15, "links[0].bandwidth is not a quantity. Did you mean 1 GB/s or 1 Gbit/s?"),
        (16, "links[1] has an unknown field 'bandwith'. Did you mean 'bandwidth'?"),
        (16, "links[1].bandwidth is not a quantity. Did you mean 20 Mbit/s?"),
        (16, "no host or region is named 'hme'. Did you mean 'home'?"),
        (17, "links[2].latency lacks its unit"),
        (17, "lacks bandwidth"),
        (18, "links[3].bandwidth is not a quantity. Did you mean 1 Gbps?"),
    ]
    assert [line for line, _ in told] == [line for line, _ in expected], told
    for line, part in expected:
        assert sum(at == line and part in text for at, text in told) == 1, (line, part, told)
    assert "like {RTX-3090: 4}" in str(caught.value)


def test_devices_that_are_counted_in_another_way() -> None:
    for written in ("4x RTX-3090", "4 RTX-3090", "4 x RTX-3090"):
        with pytest.raises(ClusterError, match=r"line 9: a value is missing.*like {RTX-3090: 4}"):
            parse_cluster(LEFTOVERS.replace("devices: 4", f"devices: {{{written}}}"))


def test_faults_that_follow_from_others_are_not_told() -> None:
    text = "{kind: cluster, version: 1, name: two, hosts: {a: {region: 5, devices: {T4: 1}}, b: {region: t, devices: "
    text += "{T4: 1}}}, links: [{between: [s, t], bandwidth: 1 Gbit/s, latency: 1 ms}]}"
    with pytest.raises(ClusterError, match=r"hosts\.a\.region") as caught:
        parse_cluster(text)  # whether a region s is missing nobody can say before a's is known
    assert caught.value.others == ()
    with pytest.raises(ClusterError, match="no host or region is named 's'"):
        parse_cluster(text.replace("region: 5", "region: r"))


def test_every_fault_of_a_job_and_of_a_workload() -> None:
    job = "{name: -x, model: gpt2, batch: 0, optimizer: {name: adagrad, learning_rate: 0, betas: [0.9, 2]}, lr: 1}"
    with pytest.raises(JobError) as caught:
        parse_jobs("{kind: job, version: 1, " + job[1:])
    texts = [error.what for error in (caught.value, *caught.value.others)]
    for field in ("'lr'", "optimizer.name", "optimizer.learning_rate", "optimizer.betas", "batch", "model"):
        assert sum(field in text for text in texts) == 1, texts
    with pytest.raises(JobError) as caught:
        parse_jobs("{kind: workload, version: 1, name: w, jobs: [" + job + ", {name: b, model: zoo:gpt2, steps: 0}]}")
    text = str(caught.value)
    assert "jobs[0].batch" in text and "jobs[1] lacks the field 'batch'" in text and "jobs[1].steps" in text
