"""How a tensor goes around a ring, and how much room there is for what comes: rules that the runtime keeps.

The simulator prices plans by the same rules.
"""

from __future__ import annotations

__all__ = ["AHEAD", "FAR", "FEWEST_TURNS", "LEAVING", "SHORT", "goes_whole", "room_for", "segments_of"]

SHORT = 1 << 15  # bytes of a tensor that is better sent whole to everybody: half as many rounds
LARGEST = 1 << 20  # bytes of a segment: one is added, still in the cache, while the next comes
WORTHY = 1 << 18  # bytes of a segment that is worth a message of its own
SMALLEST = 1 << 16  # ... where a plan asks for more segments
AT_ONCE = 4  # segments of a piece, so that while one travels the next are sent
SCRATCH = 1 << 22  # bytes on their way to be added: more would not stay in the cache
FAST, MOST = 2.5e9, 1 << 26  # ... on a long link, this many per second of a round trip; at most
FEWEST_TURNS = 2  # linear weights whose factors may come at once, whatever their size
AHEAD = 4  # messages from one run to another that may come before the one that is waited for has come
LEAVING = 16  # ... that are held by who sends them, in a step
FAR = 0.002  # seconds there and back beyond which, of two participants, a round counts more than adding


def goes_whole(count: int, size: float, round_trip: float) -> bool:
    """Return whether, to be added up, a tensor of `size` bytes goes around whole in n - 1 rounds.

    Else it is cut into n pieces: n - 1 rounds add them up, n - 1 more spread the sums. `round_trip`: seconds there and
    back between two participants; where they are more it does not matter. Two that swap all they have send as many
    bytes as in pieces, in one round instead of two, but each adds twice as much.
    """
    return size <= SHORT or (count == 2 and round_trip > FAR)


def segments_of(size: float, planned: int) -> int:
    """In how many segments `size` bytes are sent, each passed on as soon as it has come; at least one.

    As many as planned; four, where they do not get too small; and none is larger than what is best to add at once.
    """
    wanted = max(min(planned, size // SMALLEST), min(AT_ONCE, size // WORTHY), -(-size // LARGEST))
    return max(1, int(wanted))


def room_for(size: float, round_trip: float) -> float:
    """Bytes of room for `size` bytes that come from one worker: what may be on its way, and no more than there are."""
    return min(size, max(SCRATCH, min(FAST * round_trip, MOST)))
