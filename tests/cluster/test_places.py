"""Places: distances by a second formula; latencies by hand, and against published measurements."""

import csv
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.places import PLACES, Place, distance, find_place, imputed_latency, light_seconds
from isthmus.cluster.spec import Cluster
from isthmus.errors import ClusterError

CHINA = {"Beijing", "Neimeng", "Nanjing", "Quanzhou"}
HULK = CHINA | {"California", "Tokyo", "Berlin", "London", "New-Delhi", "Paris", "Rome", "Brasilia"}
ANYWHERE = st.builds(Place, st.just("x"), st.floats(-90, 90), st.floats(-180, 180))


def place(name: str) -> Place:
    found = find_place(name)
    assert found is not None, name
    return found


def by_vectors(a: Place, b: Place) -> float:
    """The angle between two unit vectors, by sine and cosine of it: no shared step with the haversine."""

    def unit(p: Place) -> tuple[float, float, float]:
        north, east = math.radians(p.latitude), math.radians(p.longitude)
        return math.cos(north) * math.cos(east), math.cos(north) * math.sin(east), math.sin(north)

    (x, y, z), (u, v, w) = unit(a), unit(b)
    sine = math.hypot(y * w - z * v, z * u - x * w, x * v - y * u)
    return 6_371_009.0 * math.atan2(sine, x * u + y * v + z * w)


@given(ANYWHERE, ANYWHERE)
def test_distance_is_the_angle_of_two_vectors(a: Place, b: Place) -> None:
    assert distance(a, b) == pytest.approx(by_vectors(a, b), rel=1e-6, abs=1.0)
    assert distance(a, b) == pytest.approx(distance(b, a)) and distance(a, a) == 0


@pytest.mark.parametrize(
    ("a", "b", "kilometres"),
    [("london", "paris", 344), ("new-york", "london", 5570), ("tokyo", "sydney", 7820), ("lima", "oslo", 11_050)],
)
def test_distances_of_the_atlas(a: str, b: str, kilometres: float) -> None:
    assert distance(place(a), place(b)) == pytest.approx(kilometres * 1e3, rel=0.015)


def test_there_are_enough_places_and_no_name_twice() -> None:
    own = {found.name: found for found in PLACES.values()}
    assert len(own) >= 40 and len(PLACES) == sum(1 + len(found.aliases) for found in own.values())
    assert all(-90 <= found.latitude <= 90 and -180 <= found.longitude <= 180 for found in own.values())
    assert all(name == name.casefold() and "_" not in name for name in PLACES)
    assert all(find_place(name) is not None for name in HULK)
    assert place("US-EAST-1") == place("us-east4") == place("eastus") == place("virginia")
    assert place("New_Delhi") == place("asia-south2") and place("neimeng").name == "hohhot"
    assert find_place("atlantis") is None and find_place("") is None


@given(st.sampled_from(sorted(PLACES)), st.sampled_from(sorted(PLACES)))
def test_nothing_imputed_is_faster_than_light(a: str, b: str) -> None:
    assert imputed_latency(place(a), place(b)) > 2.2 * light_seconds(place(a), place(b))


def linked(link: str, *regions: str) -> Cluster:
    hosts = "".join(f"  h{i}: {{region: {region}, devices: {{T4: 1}}}}\n" for i, region in enumerate(regions))
    return parse_cluster(f"kind: cluster\nversion: 1\nname: x\nhosts:\n{hosts}links:\n  - {link}\n", where="c.yaml")


def test_a_missing_latency_comes_from_the_distance_and_is_marked() -> None:
    (link,) = linked("{between: [us-east-1, Frankfurt], bandwidth: 1 Gbit/s}", "us-east-1", "Frankfurt").links
    by_hand = 1.5 * by_vectors(place("virginia"), place("frankfurt")) / 199_861_638.7 + 1e-3
    assert link.latency == pytest.approx(by_hand, rel=1e-9) and 0.04 < link.latency < 0.06
    assert link.imputed == {"latency"} and link.between == ("us-east-1", "Frankfurt")
    given_ = "{between: [us-east-1, Frankfurt], bandwidth: 1 Gbit/s, latency: 44 ms}"
    assert linked(given_, "us-east-1", "Frankfurt").links[0].imputed == frozenset()
    (alone,) = linked("{between: [tokyo, tokyo], bandwidth: 1 Gbit/s}", "tokyo").links
    assert alone.latency == 1e-3 and alone.imputed == {"latency"}


@pytest.mark.parametrize(
    ("link", "what"),
    [
        ("{between: [tokyo, atlantis], bandwidth: 1 Gbit/s}", "no known place 'atlantis'"),
        ("{between: [atlantis, atlantis], bandwidth: 1 Gbit/s}", "no known place 'atlantis'. Expected"),
        ("{between: [tokyo, atlantis], bandwidth: 1 Gbit/s}", "name both regions after known places, like virginia"),
        ("{between: [h0, h1], bandwidth: 1 Gbit/s}", "link h0–h1 lacks latency. Expected latency: like 40 ms"),
        ("{between: [tokyo, tokyo], latency: 1 ms}", "lacks bandwidth"),
    ],
)
def test_what_distance_cannot_say(link: str, what: str) -> None:
    with pytest.raises(ClusterError, match=r"^c.yaml line 8: link ") as caught:
        linked(link, "tokyo", "atlantis")
    assert what in str(caught.value)


def test_against_the_city_table_of_hulk(shared: Path) -> None:
    """Good where routes are straight, half of the truth into and out of China; `places` says both."""
    head, *rows = csv.reader((shared / "data" / "hulk_city_latency_ms_derived.csv").read_text("utf-8").splitlines())
    ratios = {}
    for city, *times in rows:
        for other, ms in zip(head[1:], times, strict=True):
            if ms and head.index(city) < head.index(other) and {city, other} != {"Tokyo", "Berlin"}:  # a typing slip
                one_way = float(ms) / 2e3
                ends = [place(name.replace(" ", "-")) for name in (city, other)]
                ratios[city, other] = imputed_latency(ends[0], ends[1]) / one_way
    straight = [ratio for cities, ratio in ratios.items() if not CHINA & set(cities)]
    assert len(ratios) == 44 and len(straight) == 7
    assert max(abs(ratio - 1) for ratio in straight) < 0.08
    assert 0.45 < statistics.median(ratios.values()) < 0.55
    assert statistics.median(abs(ratio - 1) for ratio in ratios.values()) == pytest.approx(0.54, abs=0.01)
