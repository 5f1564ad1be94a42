"""What a silo pays for its seals: a body sent sealed, as a ratio to the same body sent plain.

    python benchmarks/sealing.py            400 bodies of each size, both ways; half a minute
    python benchmarks/sealing.py --quick    20 bodies of each size; some seconds

Two nodes with a daemon each, on loopback. Over the same two transports, the same bodies go plain and through
`SiloTransport`, in turns of ten: so what else the machine does, it does to both. Times are those of one request, from the
question to the body in hand; connections are encrypted by libp2p in both cases. Beside them the processor time of all
three processes, which what else runs disturbs less, and what sealing and opening cost alone. The last line of the output
is one JSON object.
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
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from swarm.config import NetworkSection
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.transport import Transport
from swarm.records.identity import Identity
from swarm.silo.bulletin import Bulletin
from swarm.silo.grant import make_request, read_request
from swarm.silo.membership import Membership
from swarm.silo.owner import Owner
from swarm.silo.sealing import OVERHEAD_BYTES, EpochKey
from swarm.silo.silo_files import SeenRolls, SiloFiles
from swarm.silo.silo_transport import SiloTransport

SIZES_KIB = (8, 512)
SWARM_ID = "5e" * 16
_DAY_S = 86_400.0
_TURN = 10
_PLAIN, _SEALED = "bench/plain", "bench/sealed"


def silo_of(*identities: Identity) -> list[Membership]:
    """Members of one silo, each with its view of it."""
    founder, now = Identity(os.urandom(32)), time.time()
    owner = Owner.found(founder, SWARM_ID, now)
    for identity in identities:
        owner.invite(read_request(make_request(identity)), now + _DAY_S, now, "")
    memberships = [
        Membership(SWARM_ID, founder.peer_id, identity, time.time, SeenRolls(SWARM_ID)) for identity in identities
    ]
    for membership in memberships:
        membership.accept_roll(owner.data)
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
    # A little shorter, so that with its seal a body is sent in as many pieces (256 KiB) as without.
    bodies = {size: os.urandom(size * 1024 - 64) for size in SIZES_KIB}

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
            times = await _by_turns(ways, identities[0].peer_id, size, bodies[size], num_bodies)
            figures[f"{size}_kib"] = _figures(times, size)
        return figures


async def _by_turns(
    ways: tuple[tuple[Transport, str], ...], peer_id: str, size: int, body: bytes, num_bodies: int
) -> dict[str, "Times"]:
    times = {protocol: Times() for _, protocol in ways}
    for turn in range(-1, num_bodies // _TURN):  # the first one opens streams and fills caches
        for transport, protocol in ways if turn % 2 else ways[::-1]:
            cpu_s = _cpu_s()
            waited_ms = []
            for _ in range(_TURN):
                start = time.perf_counter()
                got = await transport.request(
                    peer_id, protocol, str(size).encode(), max_response_bytes=len(body), deadline_s=60.0
                )
                waited_ms.append((time.perf_counter() - start) * 1e3)
                assert got == body
            if turn >= 0:
                times[protocol].waited_ms += waited_ms
                times[protocol].cpu_ms += (_cpu_s() - cpu_s) * 1e3
    return times


def _cpu_s() -> float:
    """Of this process, in which both nodes are, and their daemons."""
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (own, *own.children()))


@dataclass
class Times:
    waited_ms: list[float] = field(default_factory=list)
    cpu_ms: float = 0.0


def _figures(times: dict[str, Times], size: int) -> dict[str, float]:
    plain, sealed_ = times[_PLAIN], times[_SEALED]
    return {
        "plain_ms": statistics.median(plain.waited_ms),
        "sealed_ms": statistics.median(sealed_.waited_ms),
        "ratio": statistics.median(sealed_.waited_ms) / statistics.median(plain.waited_ms),
        "plain_cpu_ms": plain.cpu_ms / len(plain.waited_ms),
        "sealed_cpu_ms": sealed_.cpu_ms / len(sealed_.waited_ms),
        "cpu_ratio": sealed_.cpu_ms / plain.cpu_ms,
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
        figures = asyncio.run(measure(20 if options.quick else 400, Path(folder)))
    for size, one in figures.items():
        print(
            f"{size:>8}: plain {one['plain_ms']:.2f} ms, sealed {one['sealed_ms']:.2f} ms, ratio {one['ratio']:.2f}; "
            f"processor {one['plain_cpu_ms']:.2f} and {one['sealed_cpu_ms']:.2f} ms, ratio {one['cpu_ratio']:.2f}; "
            f"sealing and opening alone {one['seal_and_open_ms']:.3f} ms"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
