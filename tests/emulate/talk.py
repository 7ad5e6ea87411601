"""Runs on an emulated host: `echo`, `ping`, `sink` and `send`, with an address and a port. Standard library only."""

from __future__ import annotations

import json
import socket
import sys
import time


def echo(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as talk:
        talk.bind((address, port))
        print("listening", flush=True)
        while True:
            talk.sendto(*talk.recvfrom(65536))


def ping(address: str, port: int, count: str) -> None:
    """Seconds of each round trip; a lost one is given up after a second."""
    trips = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as talk:
        talk.settimeout(1.0)
        for number in range(int(count)):
            start = time.perf_counter()
            talk.sendto(number.to_bytes(4, "big") + bytes(60), (address, port))
            try:
                while int.from_bytes(talk.recv(65536)[:4], "big") != number:
                    pass
            except TimeoutError:
                continue
            trips.append(time.perf_counter() - start)
    print(json.dumps(trips))


def sink(address: str, port: int) -> None:
    """The rate of one connection, after a third of its bytes: by then it is steady."""
    buffer, marks, total = bytearray(1 << 20), [], 0
    with socket.create_server((address, port)) as server:
        print("listening", flush=True)
        talk, _ = server.accept()
    with talk:
        while got := talk.recv_into(buffer):
            total += got
            marks.append((time.perf_counter(), total))
    begun, early = next(mark for mark in marks if mark[1] >= total / 3)
    print(json.dumps({"megabits": (total - early) * 8e-6 / (marks[-1][0] - begun), "bytes": total}))


def send(address: str, port: int, size: str) -> None:
    left = int(size)
    with socket.create_connection((address, port)) as talk:
        while left > 0:
            left -= talk.send(bytes(min(left, 1 << 18)))


if __name__ == "__main__":
    what, where, port, *rest = sys.argv[1:]
    {"echo": echo, "ping": ping, "sink": sink, "send": send}[what](where, int(port), *rest)
