"""What a silo pays for its seals: a body sent sealed, as a ratio to the same body sent plain.

    python benchmarks/sealing.py            200 bodies of each size, both ways; about a minute
    python benchmarks/sealing.py --quick    20 bodies of each size; some seconds

Two nodes with a daemon each, on loopback. Over the same two transports, the same bodies go plain and through
`SiloTransport`, by turns: so what else the machine does, it does to both. The time is that of one request, from the
question to the body in hand; connections are encrypted by libp2p in both cases. Beside it, what sealing and opening cost
alone. The last line of the output is one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from swarm.config import NetworkSection
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.transport import Transport
from swarm.records.identity import Identity
from swarm.silo.bulletin import Bulletin
from swarm.silo.grant import make_request, read_request
from swarm.silo.membership import Membership
from swarm.silo.owner import Owner
from swarm.silo.sealing import OVERHEAD_BYTES, EpochKey
from swarm.silo.silo_files import SiloFiles
from swarm.silo.silo_transport import SiloTransport

SIZES_KIB = (8, 512)
SWARM_ID = "5e" * 16
_DAY_S = 86_400.0
_PLAIN, _SEALED = "bench/plain", "bench/sealed"


def silo_of(*identities: Identity) -> list[Membership]:
    """Members of one silo, each with its view of it."""
    founder, now = Identity(os.urandom(32)), time.time()
    owner = Owner.found(founder, SWARM_ID, now)
    for identity in identities:
        owner.invite(read_request(make_request(identity)), now + _DAY_S, now, "")
    memberships = [Membership(SWARM_ID, founder.peer_id, identity, time.time) for identity in identities]
    for membership in memberships:
        membership.take_roll(owner.data)
    return memberships


def sealed(inner: Transport, membership: Membership, identity: Identity, folder: Path) -> SiloTransport:
    rng = random.Random(identity.peer_id)
    return SiloTransport(inner, membership, Bulletin(inner, membership, identity, SiloFiles(folder), (), rng))


async def measure(num_bodies: int, folder: Path) -> dict[str, dict[str, float]]:
    """{size: figures}"""
    identities = [Identity(os.urandom(32)) for _ in range(2)]
    folders = [folder / name for name in "ab"]
    for one in folders:
        one.mkdir()
    bodies = {size: os.urandom(size * 1024) for size in SIZES_KIB}

    async def answer(peer_id: str, request: bytes) -> bytes:
        return bodies[int(request)]

    unlimited = {"gossip": "off", "upload_bytes_per_peer_per_s": 1 << 40, "requests_per_peer_per_s": 1e6}
    holder = HivemindTransport(NetworkSection(**unlimited), identities[0], folders[0])  # type: ignore[arg-type]
    memberships = silo_of(*identities)
    silo_holder = sealed(holder, memberships[0], identities[0], folders[0])
    holder.serve(_PLAIN, answer, max_request_bytes=16)
    silo_holder.serve(_SEALED, answer, max_request_bytes=16)
    async with contextlib.AsyncExitStack() as running:
        await silo_holder.start()
        running.push_async_callback(silo_holder.stop)
        network = NetworkSection(initial_peers=holder.addresses(), **unlimited)  # type: ignore[arg-type]
        reader = HivemindTransport(network, identities[1], folders[1])
        silo_reader = sealed(reader, memberships[1], identities[1], folders[1])
        await silo_reader.start()
        running.push_async_callback(silo_reader.stop)
        ways = ((reader, _PLAIN), (silo_reader, _SEALED))
        figures = {}
        for size in SIZES_KIB:
            times_ms = await _by_turns(ways, identities[0].peer_id, size, bodies[size], num_bodies)
            figures[f"{size}_kib"] = _figures(times_ms, size)
        return figures


async def _by_turns(
    ways: tuple[tuple[Transport, str], ...], peer_id: str, size: int, body: bytes, num_bodies: int
) -> dict[str, list[float]]:
    times_ms: dict[str, list[float]] = {protocol: [] for _, protocol in ways}
    for number in range(-2, num_bodies):  # the first ones open streams and fill caches
        for transport, protocol in ways if number % 2 else ways[::-1]:
            start = time.perf_counter()
            got = await transport.request(
                peer_id, protocol, str(size).encode(), max_response_bytes=len(body), deadline_s=60.0
            )
            if number >= 0:
                times_ms[protocol].append((time.perf_counter() - start) * 1e3)
            assert got == body
    return times_ms


def _figures(times_ms: dict[str, list[float]], size: int) -> dict[str, float]:
    pairs = zip(times_ms[_SEALED], times_ms[_PLAIN], strict=True)
    return {
        "plain_ms": statistics.median(times_ms[_PLAIN]),
        "sealed_ms": statistics.median(times_ms[_SEALED]),
        "ratio": statistics.median(mine / theirs for mine, theirs in pairs),
        "seal_and_open_ms": _alone_ms(size),
        "bytes_ratio": 1 + OVERHEAD_BYTES / (size * 1024),
    }


def _alone_ms(size: int) -> float:
    """Sealing and opening without a network."""
    key, body = EpochKey(os.urandom(32), 1), os.urandom(size * 1024)
    times_ms = []
    for _ in range(50):
        start = time.perf_counter()
        assert key.open("body", key.seal("body", body, b"context"), b"context") == body
        times_ms.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 bodies of each size")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarm-sealing-") as folder:
        figures = asyncio.run(measure(20 if options.quick else 200, Path(folder)))
    for size, one in figures.items():
        print(f"{size:>8}: plain {one['plain_ms']:.2f} ms, sealed {one['sealed_ms']:.2f} ms, ratio {one['ratio']:.3f}; "
              f"sealing and opening alone {one['seal_and_open_ms']:.3f} ms")  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
