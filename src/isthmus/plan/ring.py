"""How a tensor goes around a ring, and how much memory incoming messages may take.

The runtime keeps these rules, and the simulator prices plans by them.
"""

from __future__ import annotations

__all__ = ["AHEAD", "FAR", "FEWEST_TURNS", "LEAVING", "SHORT", "goes_whole", "room_for", "segments_of"]

SHORT = 1 << 15  # bytes of a tensor up to which it is sent whole to all, in half as many rounds
LARGEST = 1 << 20  # bytes of a segment at most: one is added, still in the cache, while the next arrives
WORTHY = 1 << 18  # bytes of a segment that is worth a message of its own
SMALLEST = 1 << 16  # ... if a plan asks for more segments
AT_ONCE = 4  # segments of a piece, so that the next are sent while one travels
SCRATCH = 1 << 22  # bytes on their way to be added, beyond which they would not stay in the cache
FAST, MOST = 2.5e9, 1 << 26  # ... on a long link: this many per second of a round trip, and at most MOST
FEWEST_TURNS = 2  # linear weights whose factors may come at once, whatever their size
AHEAD = 4  # messages from one run to another that may arrive before the one that is waited for
LEAVING = 16  # ... that their sender holds, in a step
FAR = 0.002  # seconds of a round trip beyond which, with two participants, a round costs more than adding


def goes_whole(count: int, size: float, round_trip: float) -> bool:
    """Return whether a tensor of `size` bytes, to be added up, goes around the ring whole in n - 1 rounds.

    Otherwise it is cut into n pieces: n - 1 rounds add them up, and n - 1 more spread the sums. `round_trip` is the
    seconds there and back between two participants; where there are more participants it does not matter. Two
    participants that swap all they have send as many bytes as they would in pieces, in one round instead of two, but
    each adds twice as much.
    """
    return size <= SHORT or (count == 2 and round_trip > FAR)


def segments_of(size: float, planned: int) -> int:
    """Return in how many segments `size` bytes are sent, each passed on as soon as it has arrived; at least one.

    That is as many as planned, or four if they do not get too small; and no segment is larger than is best to add at
    once.
    """
    wanted = max(min(planned, size // SMALLEST), min(AT_ONCE, size // WORTHY), -(-size // LARGEST))
    return max(1, int(wanted))


def room_for(size: float, round_trip: float) -> float:
    """Return the room in bytes for `size` bytes that come from one worker: what may be on its way, at most all."""
    return min(size, max(SCRATCH, min(FAST * round_trip, MOST)))
