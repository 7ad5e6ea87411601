"""Measure a cluster from its own hosts: the bandwidth and latency of its links, shared capacity, and all-reduces.

Read the files in this order:

- `probe.py`: the leader's side, which chooses the pairs to measure at the same time and collects the results.
- `prober.py`: a host's side, which obeys the leader and measures pairs.
- `probers.py`: brings probers together, as processes started here or at a meeting point.
- `sealed_lines.py`: authenticated lines of JSON between leader, probers and pairs.
- `probed_cluster.py`: writes the measurements into the cluster, with notes.
- `sync_times.py`: the leader's side of measuring all-reduces: ring, tree and server.
- `sync_participants.py`: the participants of all-reduces on one host, and the messages to and from them.
- `sync_participant.py`: the process of one participant.
"""
