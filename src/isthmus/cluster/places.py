"""Where regions lie, by the names that people and clouds give them, and how long messages take between two of them.

A link between two known places that gives no latency gets

    one way = FACTOR x great-circle distance / (2/3 of the speed of light) + CONSTANT

2/3 of the speed of light is its speed in glass. FACTOR is 1.5, because cables follow coasts and routes follow cables:
the seven pairs of the Hulk data (64 bytes between cities, halved) that do not involve China take 1.42 to 1.62 times the
straight line. CONSTANT is 1 ms, for routers and the last miles at both ends. Two names for one place get only the
constant, which is more than two hosts of one data centre need. Compared with the Hulk data the error is at most 8 % on
those seven pairs, from which FACTOR was chosen. Over all 44 pairs its median is 54 %, mostly too low: traffic inside,
into and out of China takes 2 to 12 times the straight line. A measured figure is always better: half of what `ping`
shows.

Distance says nothing about bandwidth, which is therefore never filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from isthmus.units import Seconds

__all__ = ["CONSTANT", "FACTOR", "PLACES", "Place", "distance", "find_place", "imputed_latency", "light_seconds"]

FACTOR = 1.5
CONSTANT = Seconds(1e-3)

_LIGHT = 299_792_458.0  # metres per second, in vacuum
_EARTH = 6_371_009.0  # metres, mean radius


class Place(msgspec.Struct, frozen=True):
    """A city or region, in degrees north and east, with the other names it is known by."""

    name: str
    latitude: float
    longitude: float
    aliases: tuple[str, ...] = ()


def _place(name: str, latitude: float, longitude: float, aliases: str = "") -> Place:
    return Place(name, latitude, longitude, tuple(aliases.split()))


# Coordinates are those of the city or of the data centres' county, to about 10 km (0.1 degrees). The names of regions
# are those of Amazon (us-east-1), Google (us-east4) and Microsoft (eastus), as their own lists of regions give them.
_TABLE = (
    # North America
    _place("virginia", 39.0, -77.5, "us-east-1 us-east4 eastus eastus2 ashburn northern-virginia"),
    _place("new-york", 40.7, -74.0, "newyork nyc"),
    _place("boston", 42.4, -71.1),
    _place("ohio", 40.0, -83.0, "us-east-2 us-east5 columbus"),
    _place("south-carolina", 33.2, -80.0, "us-east1"),
    _place("illinois", 41.9, -87.6, "northcentralus chicago"),
    _place("iowa", 41.6, -93.6, "us-central1 centralus"),
    _place("texas", 32.8, -96.8, "us-south1 dallas"),
    _place("san-antonio", 29.4, -98.5, "southcentralus"),
    _place("utah", 40.8, -111.9, "us-west3 salt-lake-city"),
    _place("nevada", 36.2, -115.1, "us-west4 las-vegas"),
    _place("arizona", 33.4, -112.1, "westus3 phoenix"),
    _place("california", 37.4, -122.0, "us-west-1 westus northern-california silicon-valley san-francisco"),
    _place("los-angeles", 34.1, -118.2, "us-west2"),
    _place("oregon", 45.6, -121.2, "us-west-2 us-west1"),
    _place("washington-state", 47.2, -119.9, "westus2 seattle"),
    _place("montreal", 45.5, -73.6, "ca-central-1 northamerica-northeast1"),
    _place("quebec", 46.8, -71.2, "canadaeast"),
    _place("toronto", 43.7, -79.4, "northamerica-northeast2 canadacentral"),
    _place("calgary", 51.0, -114.1, "ca-west-1"),
    _place("mexico", 20.6, -100.4, "mx-central-1 northamerica-south1 mexicocentral queretaro"),
    # South America
    _place("sao-paulo", -23.5, -46.6, "sa-east-1 southamerica-east1 brazilsouth saopaulo"),
    _place("brasilia", -15.8, -47.9),
    _place("santiago", -33.4, -70.7, "southamerica-west1 chilecentral chile"),
    _place("lima", -12.0, -77.0),
    # Europe
    _place("london", 51.5, -0.1, "eu-west-2 europe-west2 uksouth"),
    _place("wales", 51.5, -3.2, "ukwest cardiff"),
    _place("ireland", 53.3, -6.3, "eu-west-1 northeurope dublin"),
    _place("paris", 48.9, 2.4, "eu-west-3 europe-west9 francecentral"),
    _place("belgium", 50.5, 3.8, "europe-west1"),
    _place("netherlands", 52.4, 4.9, "europe-west4 westeurope amsterdam"),
    _place("frankfurt", 50.1, 8.7, "eu-central-1 europe-west3 germanywestcentral"),
    _place("berlin", 52.5, 13.4, "europe-west10"),
    _place("zurich", 47.4, 8.5, "eu-central-2 europe-west6 switzerlandnorth"),
    _place("milan", 45.5, 9.2, "eu-south-1 europe-west8 italynorth"),
    _place("turin", 45.1, 7.7, "europe-west12"),
    _place("rome", 41.9, 12.5),
    _place("madrid", 40.4, -3.7, "europe-southwest1 spaincentral"),
    _place("aragon", 41.7, -0.9, "eu-south-2 zaragoza"),
    _place("lisbon", 38.7, -9.1),
    _place("stockholm", 59.3, 18.1, "eu-north-1 europe-north2"),
    _place("gavle", 60.7, 17.1, "swedencentral"),
    _place("oslo", 59.9, 10.8, "norwayeast"),
    _place("copenhagen", 55.7, 12.6, "denmarkeast"),
    _place("finland", 60.6, 27.2, "europe-north1 hamina"),
    _place("warsaw", 52.2, 21.0, "europe-central2 polandcentral"),
    _place("vienna", 48.2, 16.4, "austriaeast"),
    # Middle East and Africa
    _place("tel-aviv", 32.1, 34.8, "il-central-1 me-west1 israelcentral"),
    _place("bahrain", 26.1, 50.6, "me-south-1"),
    _place("dubai", 25.2, 55.3, "me-central-1 uaenorth uae"),
    _place("qatar", 25.3, 51.5, "me-central1 qatarcentral doha"),
    _place("johannesburg", -26.2, 28.0, "africa-south1 southafricanorth"),
    _place("cape-town", -33.9, 18.4, "af-south-1 southafricawest"),
    # Asia
    _place("mumbai", 19.1, 72.9, "ap-south-1 asia-south1 westindia"),
    _place("pune", 18.5, 73.9, "centralindia"),
    _place("new-delhi", 28.6, 77.2, "asia-south2 delhi newdelhi"),
    _place("hyderabad", 17.4, 78.5, "ap-south-2"),
    _place("chennai", 13.1, 80.3, "southindia"),
    _place("singapore", 1.3, 103.8, "ap-southeast-1 asia-southeast1 southeastasia"),
    _place("jakarta", -6.2, 106.8, "ap-southeast-3 asia-southeast2 indonesiacentral"),
    _place("malaysia", 3.1, 101.7, "ap-southeast-5 malaysiawest kuala-lumpur"),
    _place("bangkok", 13.8, 100.5, "ap-southeast-7 thailand"),
    _place("hong-kong", 22.3, 114.2, "ap-east-1 asia-east2 eastasia hongkong"),
    _place("taiwan", 24.1, 120.5, "asia-east1 changhua"),
    _place("taipei", 25.0, 121.6, "ap-east-2"),
    _place("seoul", 37.6, 127.0, "ap-northeast-2 asia-northeast3 koreacentral"),
    _place("tokyo", 35.7, 139.7, "ap-northeast-1 asia-northeast1 japaneast"),
    _place("osaka", 34.7, 135.5, "ap-northeast-3 asia-northeast2 japanwest"),
    _place("beijing", 39.9, 116.4, "cn-north-1 chinanorth"),
    _place("hohhot", 40.8, 111.7, "neimeng inner-mongolia"),
    _place("ningxia", 37.5, 105.2, "cn-northwest-1"),
    _place("shanghai", 31.2, 121.5, "chinaeast"),
    _place("nanjing", 32.1, 118.8),
    _place("quanzhou", 24.9, 118.7),
    _place("shenzhen", 22.5, 114.1),
    # Oceania
    _place("sydney", -33.9, 151.2, "ap-southeast-2 australia-southeast1 australiaeast"),
    _place("melbourne", -37.8, 145.0, "ap-southeast-4 australia-southeast2 australiasoutheast"),
    _place("auckland", -36.8, 174.8, "ap-southeast-6 newzealandnorth"),
)

PLACES: Mapping[str, Place] = {name: place for place in _TABLE for name in (place.name, *place.aliases)}


def find_place(name: str) -> Place | None:
    """Return the place with that name or alias, ignoring case and reading `_` as `-` (`New_Delhi` is `new-delhi`)."""
    return PLACES.get(name.casefold().replace("_", "-"))


def distance(a: Place, b: Place) -> float:
    """Return the length of the great circle in metres: 2 R asin sqrt(sin²(Δφ/2) + cos φ₁ cos φ₂ sin²(Δλ/2)).

    This form is accurate for places near each other too.
    """
    north, other = math.radians(a.latitude), math.radians(b.latitude)
    across = math.radians(b.longitude - a.longitude)
    half = math.sin((other - north) / 2) ** 2 + math.cos(north) * math.cos(other) * math.sin(across / 2) ** 2
    return 2 * _EARTH * math.asin(math.sqrt(min(1.0, half)))


def light_seconds(a: Place, b: Place) -> Seconds:
    """Return the time that light in vacuum takes for the straight way; no message is faster."""
    return Seconds(distance(a, b) / _LIGHT)


def imputed_latency(a: Place, b: Place) -> Seconds:
    """Return the one-way latency between two places, by the formula at the head of this file."""
    return Seconds(FACTOR * distance(a, b) / (_LIGHT * 2 / 3) + CONSTANT)
