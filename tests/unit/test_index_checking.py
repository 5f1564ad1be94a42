"""What strangers make a node check of index entries: false ones of one peer end soon, and all together take part of its time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hivemind")

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from swarm.network import index_entry
from swarm.network.hivemind.index_guard import MAX_STORE_WAIT_S, MAX_WAITING_BYTES, CallRefused, IndexGuard, wrap
from swarm.network.hivemind.index_storage import FlatSerializer
from swarm.network.index_entry import (
    CHECKING_BURST_S,
    CHECKING_SHARE,
    MAX_ENTRIES_PER_KEY,
    MAX_FALSE_ENTRIES,
    UNSIGNED,
    IndexRule,
    Validity,
)
from swarm.network.memory.virtual_clock import run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
messages: Any = dht_pb2
STORE = "DHTProtocol.rpc_store"
KEY = "key"
KEY_ID = DHTID.generate(source=KEY)
CHECK_S = 0.25e-3
NUM_ENTRIES = 1000
FALSE, TRUE = b"false", b"true"


class Checks:
    """A validator that counts, and whose checks take time: on the clock that `IndexRule` reads, beside the loop's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(index_entry, "perf_counter", lambda: _loop_time() + self.count * CHECK_S)

    def __call__(self, key: str, subkey: str, value: bytes) -> Validity | None:
        self.count += 1
        return UNSIGNED if value.startswith(TRUE) else None


def _loop_time() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # a rule is made before there is a loop
        return 0.0


class _Protocol(DHTProtocol):
    """hivemind's own service, without a daemon."""

    def __init__(self, guard: IndexGuard) -> None:
        self.record_validator = guard
        self.node_info = messages.NodeInfo()
        self.p2p: Any = SimpleNamespace(
            _client=SimpleNamespace(
                control=SimpleNamespace(unary_handlers={STORE: self._serve}, _handler_tasks={}), add_unary_handler=None
            )
        )
        guard.protect(self)

    async def _serve(self, request: bytes, peer_id: PeerID) -> bytes:
        context: Any = None
        return (await self.rpc_store(messages.StoreRequest.FromString(request), context)).SerializeToString()


class Host:
    """A node that takes entries of others."""

    def __init__(self, checks: Checks) -> None:
        self.guard = IndexGuard(checks, time.time)
        self.protocol = _Protocol(self.guard)
        self._handle: Callable[[bytes, PeerID], Awaitable[bytes]] = self.protocol.p2p._client.control.unary_handlers[
            STORE
        ]

    async def is_taken(self, caller: int, entries: dict[str, bytes]) -> bool:
        expires_at, given = time.time() + 60, DictionaryDHTValue()
        for subkey, value in entries.items():
            given.store(subkey, DHTProtocol.serializer.dumps(wrap(KEY, value)), expires_at)
        request = messages.StoreRequest(
            keys=[KEY_ID.to_bytes()],
            subkeys=[DHTProtocol.IS_DICTIONARY],
            values=[FlatSerializer.dumps(given)],
            expiration_time=[expires_at],
            in_cache=[False],
        )
        answer = await self._handle(request.SerializeToString(), PeerID(b"\x00\x24" + caller.to_bytes(36, "big")))
        return messages.StoreResponse.FromString(answer).store_ok[0]


def made_up(start: int, value: bytes) -> dict[str, bytes]:
    return {f"name {start + number}": value for number in range(NUM_ENTRIES)}


def test_false_entries_of_one_peer_cost_few_checks_and_keep_out_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks(monkeypatch)

    async def main() -> None:
        host = Host(checks)
        for call in range(3):
            assert not await host.is_taken(1, made_up(call * NUM_ENTRIES, FALSE))
        assert checks.count == MAX_FALSE_ENTRIES
        assert host.guard.refused["unheard"] == 3 * NUM_ENTRIES - MAX_FALSE_ENTRIES
        assert await host.is_taken(2, {"honest": TRUE})
        await asyncio.sleep(3600)
        assert await host.is_taken(1, {"late": TRUE}), "it may have been an earlier release"

    run(main())


def test_entries_that_strangers_have_signed_take_no_more_than_a_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = Checks(monkeypatch)

    async def main() -> None:
        host, num_refused, num_calls = Host(checks), 0, 40

        async def call(number: int) -> None:
            nonlocal num_refused
            try:
                await host.is_taken(number, made_up(number * NUM_ENTRIES, TRUE))
            except CallRefused:
                num_refused += 1

        start = asyncio.get_running_loop().time()
        for number in range(num_calls):
            await asyncio.gather(call(2 * number), call(2 * number + 1))
            await asyncio.sleep(0.1)
        took_s = asyncio.get_running_loop().time() - start + checks.count * CHECK_S
        allowed_s = CHECKING_BURST_S + CHECKING_SHARE * took_s + NUM_ENTRIES * CHECK_S
        assert checks.count * CHECK_S <= allowed_s
        assert checks.count > 2 * NUM_ENTRIES

    run(main())


def test_a_light_node_hears_a_lying_host_for_a_few_entries_and_the_others_for_all() -> None:
    checked: list[str] = []

    def validator(key: str, subkey: str, value: bytes) -> Validity | None:
        checked.append(subkey)
        return UNSIGNED if value == TRUE else None

    rule = IndexRule(validator, lambda: 0.0)
    lies = [("liar", subkey, FALSE, None) for subkey in made_up(0, FALSE)]
    truth = [("honest", subkey, TRUE, None) for subkey in made_up(NUM_ENTRIES, TRUE)]
    assert run(rule.newest(KEY, [lies, truth])) == made_up(NUM_ENTRIES, TRUE)
    assert len(checked) <= MAX_FALSE_ENTRIES + 1 + NUM_ENTRIES


def test_an_entry_that_several_hosts_hold_is_checked_until_one_copy_of_it_is_valid() -> None:
    checked: list[bytes] = []

    def validator(key: str, subkey: str, value: bytes) -> Validity | None:
        checked.append(value)
        return Validity(0.0, 60.0, (float(value), 0, b""))

    rule = IndexRule(validator, lambda: 10.0)
    expired, older, newer = ("first", "name", b"2", 5.0), ("second", "name", b"1", 60.0), ("third", "name", b"2", 60.0)
    copies = [expired, older, newer, ("fourth", "name", b"2", 60.0), ("fifth", "name", b"1", 60.0)]
    assert run(rule.newest(KEY, [[copy] for copy in copies])) == {"name": b"2"}
    assert checked == [b"1", b"2", b"1"], "the expired copy before the check, the second of the newest not at all"


def test_hosts_that_name_many_strangers_neither_hold_the_loop_nor_keep_out_an_honest_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = Checks(monkeypatch)

    async def main() -> None:
        rule, in_one_piece = IndexRule(checks, lambda: 0.0), list[int]()

        async def watch() -> None:
            while True:
                before = checks.count
                await asyncio.sleep(0)
                in_one_piece.append(checks.count - before)

        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0)
        answers = [[(f"host {n}", name, TRUE, None) for name in made_up(n * NUM_ENTRIES, TRUE)] for n in range(7)]
        honest = [("honest", f"member {number}", TRUE, None) for number in range(64)]
        found = await rule.newest(KEY, [*answers, honest])
        watching.cancel()
        assert {name for _, name, _, _ in honest} <= found.keys()
        assert checks.count == len(found) == MAX_ENTRIES_PER_KEY
        assert 0 < max(in_one_piece) <= 128

    run(main())


def test_stores_that_wait_for_their_check_are_bounded_in_time_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks(monkeypatch)

    async def main() -> None:
        host, most_waiting, loop = Host(checks), 0, asyncio.get_running_loop()
        large = {"long": TRUE + bytes(1 << 20)}

        async def call(number: int, entries: dict[str, bytes]) -> float:
            nonlocal most_waiting
            began_s = loop.time()
            try:
                await host.is_taken(number, entries)
            except CallRefused:
                pass
            most_waiting = max(most_waiting, host.guard.calls.waiting_bytes)
            return loop.time() - began_s

        for start in (0, 2 * NUM_ENTRIES):
            await call(0, made_up(start, TRUE) | made_up(start + NUM_ENTRIES, TRUE))
        waits_s = await asyncio.gather(*(call(number, large) for number in range(1, 101)))
        assert max(waits_s) <= MAX_STORE_WAIT_S + 0.1
        assert (1 << 20) < most_waiting <= MAX_WAITING_BYTES
        assert host.guard.refused["busy"] >= 100 - MAX_WAITING_BYTES // (1 << 20)
        assert host.guard.calls.waiting_bytes == 0

    run(main())
