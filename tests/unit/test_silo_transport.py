"""Which peers a silo's node answers and asks, what it opens, and on which folder it starts."""

import asyncio
import random
from pathlib import Path

import pytest

from swarm.config import parse
from swarm.errors import RequestError, SiloError
from swarm.machine.node_folder import NodeFolder
from swarm.network.index_entry import UNSIGNED, Validity
from swarm.network.memory.network import MemoryNetwork
from swarm.network.memory.transport import MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.network.transport import GossipHandler, Line, ValidationResult
from swarm.records.codec import MAX_RECORD_BYTES, encode_record
from swarm.records.identity import Identity
from swarm.records.signing import sign_record
from swarm.silo.bulletin import BULLETIN_PROTOCOL, Bulletin
from swarm.silo.membership import GRACE_S, Membership
from swarm.silo.owner import Owner
from swarm.silo.roll import encode_roll
from swarm.silo.sealing import OVERHEAD_BYTES, EpochKey
from swarm.silo.silo_files import SeenRolls, SiloFiles
from swarm.silo.silo_transport import (
    SealedIndex,
    SiloTransport,
    admits,
    check_folder,
    node_transport,
    open_membership,
    silo_transport,
)
from tests.unit.silo_factory import DAY_S, NOW, OWNER, SILO_ID, folder_of, found, identity_of, invite, membership_of

ANN, BEN, CAT, EVE = (identity_of(number) for number in range(4))


class Beneath(MemoryTransport):
    """The transport beneath a silo's. It shows which topics are joined."""

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        super().__init__(network, peer_id, lambda *_: UNSIGNED)
        self.joined: dict[str, GossipHandler] = {}
        self.num_joined = 0

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        self.joined[topic] = handler
        self.num_joined += 1
        super().subscribe(topic, handler)

    def unsubscribe(self, topic: str) -> None:
        del self.joined[topic]
        super().unsubscribe(topic)


class Node:
    """A member's transport over a network in memory."""

    def __init__(self, network: MemoryNetwork, identity: Identity, folder: Path, roll: bytes) -> None:
        self.membership = Membership(SILO_ID, OWNER.peer_id, identity, virtual_now, SeenRolls(SILO_ID))
        self.membership.accept_roll(roll)
        self.inner = Beneath(network, identity.peer_id)
        files, rng = SiloFiles(folder), random.Random(1)
        self.bulletin = Bulletin(self.inner, self.membership, identity, files, entrances=(), rng=rng)
        self.silo = SiloTransport(self.inner, self.membership, self.bulletin)


class Pair:
    """Ann and Ben, connected. Their transports are started but for the work of their bulletins."""

    def __init__(self, folder: Path) -> None:
        self.network = MemoryNetwork(random.Random(1), virtual_now)
        self.owner = found(ANN, BEN, CAT)
        self.ann, self.ben = (
            Node(self.network, one, folder_of(folder / one.peer_id, self.owner), self.owner.data) for one in (ANN, BEN)
        )

    async def __aenter__(self) -> "Pair":
        await self.ann.silo.start()
        await self.ben.silo.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.ann.silo.stop()
        await self.ben.silo.stop()


async def echo(caller: str, request: bytes) -> bytes:
    return request


@pytest.mark.parametrize("has_roll", [False, True], ids=["newcomer", "member"])
@pytest.mark.parametrize(
    ("peer", "wanted", "newcomer_admits", "member_admits"),
    [
        (EVE, BULLETIN_PROTOCOL, True, True),  # its grant says who it is
        (CAT, "index", True, False),  # an entrance
        (CAT, "body", False, False),
        (EVE, "index", False, False),
        (BEN, "index", False, True),
        (BEN, "body", False, True),
    ],
)
def test_members_are_answered_and_entrances_by_a_newcomer(
    has_roll: bool, peer: Identity, wanted: str, newcomer_admits: bool, member_admits: bool
) -> None:
    membership = membership_of(ANN, found(ANN, BEN).data if has_roll else None)
    admit = admits(membership, [CAT.peer_id])
    assert admit(peer.peer_id, wanted) is (member_admits if has_roll else newcomer_admits)


def test_requests_pass_between_members_with_the_bounds_of_the_plain_text(tmp_path: Path) -> None:
    async def main() -> None:
        async with Pair(tmp_path) as pair:
            pair.ben.silo.serve("echo", echo, max_request_bytes=100)

            async def ask(num_bytes: int, max_response_bytes: int = 100, peer: Identity = BEN) -> bytes:
                return await pair.ann.silo.request(
                    peer.peer_id, "echo", bytes(num_bytes), max_response_bytes=max_response_bytes, deadline_s=5
                )

            assert await ask(100) == bytes(100) and await ask(0) == b""
            for failing in (ask(101), ask(100, max_response_bytes=99)):
                with pytest.raises(RequestError) as caught:
                    await failing
                assert caught.value.reason in ("oversize", "refused")
            with pytest.raises(RequestError, match="not a member") as caught:
                await ask(1, peer=EVE)
            assert caught.value.reason == "refused"

    run(main())


def test_lines_lead_to_members_and_a_frame_out_of_its_place_ends_them(tmp_path: Path) -> None:
    async def echo_line(line: Line) -> None:
        while True:
            await line.send(await line.receive(100))

    async def main() -> None:
        pair = Pair(tmp_path)
        pair.ben.silo.serve_lines("echo", echo_line)
        eve = MemoryTransport(pair.network, EVE.peer_id)
        async with pair:
            await eve.start()
            line = await pair.ann.silo.open_line(BEN.peer_id, "echo", deadline_s=5)
            await line.send(b"one", b"two")
            assert [await line.receive(100), await line.receive(100)] == [b"one", b"two"]
            plain = await pair.ann.inner.open_line(BEN.peer_id, "echo", deadline_s=5)
            place = f"line/echo/{ANN.peer_id}/{BEN.peer_id}/forth/0".encode()
            sealed = pair.ann.membership.keys.current.seal("echo", b"x", place)
            await plain.send(sealed)
            assert len(await plain.receive(200)) == 1 + OVERHEAD_BYTES
            await plain.send(sealed)  # once more
            with pytest.raises(RequestError, match="cut"):
                await plain.receive(200)
            assert pair.ben.silo.refused["silo/forged"] == 1
            stranger = await eve.open_line(BEN.peer_id, "echo", deadline_s=5)
            with pytest.raises(RequestError, match="cut"):
                await stranger.receive(200)
            assert pair.ben.silo.refused["silo/stranger"] == 1
            with pytest.raises(RequestError, match="not a member"):
                await pair.ann.silo.open_line(EVE.peer_id, "echo", deadline_s=5)
            await eve.stop()

    run(main())


def test_what_does_not_open_is_refused_by_its_fault_and_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with Pair(tmp_path) as pair:
            pair.ben.silo.serve("echo", echo, max_request_bytes=100)
            eve = MemoryTransport(pair.network, EVE.peer_id)
            await eve.start()
            for sender, request, answer in [
                (pair.ann.inner, bytes(OVERHEAD_BYTES - 1), "malformed"),
                (pair.ann.inner, EpochKey(b"x" * 32, 1).seal("echo", b"", b""), "forged"),
                (pair.ann.inner, EpochKey(b"x" * 32, 9).seal("echo", b"", b""), "unknown_epoch"),
                (eve, b"anything", "not a member"),
            ]:
                with pytest.raises(RequestError, match=f"refused: {answer}"):
                    await sender.request(BEN.peer_id, "echo", request, max_response_bytes=100, deadline_s=5)
            pair.ben.bulletin.faults["two_rolls"] += 2
            refused = pair.ben.silo.refused
            assert {name: refused[f"silo/{name}"] for name in ("malformed", "forged", "stranger", "two_rolls")} == {
                "malformed": 1, "forged": 1, "stranger": 1, "two_rolls": 2
            }  # fmt: skip
            assert refused.items() > pair.ben.inner.refused.items() and pair.ben.inner.refused
            await eve.stop()

    run(main())


@pytest.mark.parametrize(("epoch", "is_asked"), [(1, False), (4, True)])
def test_only_a_member_that_seals_under_a_newer_key_is_asked_for_its_roll(
    tmp_path: Path, epoch: int, is_asked: bool
) -> None:
    async def main() -> None:
        async with Pair(tmp_path) as pair:
            pair.ben.silo.serve("echo", echo, max_request_bytes=100)
            cat, questions = MemoryTransport(pair.network, CAT.peer_id), list[bytes]()

            async def note(caller: str, question: bytes) -> bytes:
                questions.append(question)
                return b""

            cat.serve(BULLETIN_PROTOCOL, note, max_request_bytes=1000)
            for _ in range(2):
                pair.owner.rotate(virtual_now())
                pair.ben.membership.accept_roll(pair.owner.data)
            await asyncio.sleep(4.5)  # the others have compared their rolls
            await cat.start()
            request = EpochKey(b"x" * 32, epoch).seal("echo", b"", b"")
            with pytest.raises(RequestError, match="refused: unknown_epoch"):
                await cat.request(BEN.peer_id, "echo", request, max_response_bytes=99, deadline_s=5)
            await asyncio.sleep(0.5)
            assert len(questions) == is_asked

    run(main())


def test_topics_are_joined_once_for_each_key_and_left_after_the_time_of_grace(tmp_path: Path) -> None:
    async def main() -> None:
        async with Pair(tmp_path) as pair:
            ann, heard = pair.ann, list[bytes]()
            ann.silo.subscribe("topic", lambda peer, message: heard.append(message) or ValidationResult.ACCEPT)
            (old,) = ann.inner.joined
            judge, message = ann.inner.joined[old], encode_record(sign_record(BEN, SILO_ID, b"payload"))
            sealed = ann.membership.keys.current.seal("gossip", message, old.encode())
            assert judge(BEN.peer_id, sealed) is ValidationResult.ACCEPT and heard == [message]
            pair.owner.rotate(virtual_now())
            ann.membership.accept_roll(pair.owner.data)
            new = ann.membership.keys.current.hidden("topic")
            await ann.silo.publish("topic", bytes(MAX_RECORD_BYTES))
            assert set(ann.inner.joined) == {old, new} and ann.inner.num_joined == 2
            with pytest.raises(ValueError, match=f"<= {MAX_RECORD_BYTES} bytes, got {MAX_RECORD_BYTES + 1}"):
                await ann.silo.publish("topic", bytes(MAX_RECORD_BYTES + 1))
            await asyncio.sleep(GRACE_S)
            await ann.silo.publish("topic", b"")
            assert set(ann.inner.joined) == {new}
            sealed = ann.membership.keys.current.seal("gossip", message, new.encode())
            judge = ann.inner.joined[new]
            assert judge(BEN.peer_id, sealed) is ValidationResult.ACCEPT and len(heard) == 2
            ann.silo.unsubscribe("topic")
            assert not ann.inner.joined
            assert judge(BEN.peer_id, sealed) is ValidationResult.IGNORE, "it was on its way"
            assert judge(EVE.peer_id, sealed) is ValidationResult.IGNORE and len(heard) == 2

    run(main())


@pytest.mark.parametrize(
    ("epoch", "secret", "author", "verdict"),
    [
        (1, None, BEN, ValidationResult.ACCEPT),
        (1, None, EVE, ValidationResult.IGNORE),
        (1, None, None, ValidationResult.REJECT),
        (1, b"x" * 32, BEN, ValidationResult.REJECT),
        (9, b"x" * 32, BEN, ValidationResult.IGNORE),
    ],
    ids=["member", "author is no member", "no record", "another key", "key of the future"],
)
def test_gossip_counts_of_members_under_the_groups_key(
    tmp_path: Path, epoch: int, secret: bytes | None, author: Identity | None, verdict: ValidationResult
) -> None:
    async def main() -> None:
        async with Pair(tmp_path) as pair:
            pair.ann.silo.subscribe("topic", lambda *_: ValidationResult.ACCEPT)
            key = pair.ann.membership.keys.current if secret is None else EpochKey(secret, epoch)
            message = b"spam" if author is None else encode_record(sign_record(author, SILO_ID, b"payload"))
            (name,) = pair.ann.inner.joined
            judge = pair.ann.inner.joined[name]
            assert judge(BEN.peer_id, key.seal("gossip", message, name.encode())) is verdict

    run(main())


def test_entries_of_both_keys_are_loaded_and_the_newer_one_counts(tmp_path: Path) -> None:
    async def main() -> None:
        async with Pair(tmp_path) as pair:
            both, mine, foreign = (f"{one.peer_id}/0" for one in (BEN, ANN, EVE))
            until = virtual_now() + 600
            for subkey in (both, mine):
                assert await pair.ann.silo.store("key", subkey, b"old", until)
            pair.owner.rotate(virtual_now())
            for node in (pair.ann, pair.ben):
                node.membership.accept_roll(pair.owner.data)
            assert await pair.ann.silo.store("key", both, b"new", until)
            hidden = pair.ann.membership.keys.current.hidden("key")
            assert await pair.ann.inner.store(hidden, foreign, b"spam", until)
            assert await pair.ann.silo.load("key") == {both: b"new", mine: b"old"}
            assert pair.ann.silo.refused["silo/stranger"] == 1
            assert await pair.ann.silo.load("other") == {}

    run(main())


def test_an_entry_is_judged_as_plain_text_where_it_opens() -> None:
    ann = membership_of(ANN, found(ANN, BEN).data)
    judged: list[tuple[str, str, bytes]] = []

    def judge(key: str, subkey: str, value: bytes) -> Validity:
        judged.append((key, subkey, value))
        return UNSIGNED

    index, subkey = SealedIndex(ann, judge), f"{BEN.peer_id}/1"
    name, sealed = index.sealed("key", subkey, b"a\0b")
    assert index(name, subkey, sealed) is UNSIGNED and judged == [("key", subkey, b"a\0b")]
    assert SealedIndex(ann)(name, subkey, sealed) is UNSIGNED, "without a judge"
    for place in ((name, f"{BEN.peer_id}/2"), ("00" * 32, subkey), (name, EVE.peer_id)):
        assert index(*place, sealed) is None
    misplaced = ann.keys.current.seal("index", b"other\0value", f"{name}/{subkey}".encode())
    assert index(name, subkey, misplaced) is None, "sealed for the name of another key"
    assert len(judged) == 1


class Folder:
    """A node's folder, and what opening it needs."""

    def __init__(self, path: Path, roll: bytes | None = None, token: str | None = None, seen: Owner | None = None):
        path.mkdir(mode=0o700, exist_ok=True)
        self.folder, files = NodeFolder(path), SiloFiles(path)
        if roll is not None:
            files.write_roll(roll)
        if token is not None:
            files.write_token(token)
        if seen is not None:
            rolls = SeenRolls(SILO_ID, self.folder.identity)
            rolls.note(seen.roll, seen.data)
            rolls.save()

    def open(self, identity: Identity = ANN, now: float = NOW) -> Membership:
        return open_membership(OWNER.peer_id, SILO_ID, identity, self.folder, clock=lambda: now)


def test_a_roll_or_an_invitation_makes_a_node_a_member_until_its_end(tmp_path: Path) -> None:
    owner = found(BEN)
    token = invite(owner, ANN)
    for folder in (
        Folder(tmp_path / "roll", owner.data),
        Folder(tmp_path / "token", token=token),
        Folder(tmp_path / "restarted", token=token, seen=owner),
        Folder(tmp_path / "both", owner.data, token),
    ):
        check_folder(folder.folder)
        assert folder.open().is_member(ANN.peer_id) and folder.open(now=NOW + DAY_S - 1).keys.epoch == 1
        with pytest.raises(SiloError, match=r"without .* or past its end"):
            folder.open(now=NOW + DAY_S)
    with pytest.raises(SiloError, match="the roll or an invitation without"):
        Folder(tmp_path / "roll").open(identity=EVE)
    with pytest.raises(SiloError, match="must be a member, got no invitation in"):
        check_folder(Folder(tmp_path / "empty").folder)
    with pytest.raises(SiloError, match="must be a member"):
        Folder(tmp_path / "empty").open()


def test_what_was_seen_decides_between_an_old_roll_and_an_invitation(tmp_path: Path) -> None:
    owner = found(ANN, BEN)
    old_roll, old_token = owner.data, invite(owner, ANN)
    owner.rotate(NOW)
    seen = Owner(OWNER, owner.roll)
    token = invite(owner, ANN)
    restored = Folder(tmp_path / "restored", old_roll, old_token, seen)
    with pytest.raises(SiloError, match=r"copy silo\.roll from the folder of another member"):
        restored.open()
    with pytest.raises(SiloError, match="an invitation from before epoch 2, which it has seen"):
        Folder(tmp_path / "invited before", token=old_token, seen=seen).open()
    assert Folder(tmp_path / "invited again", old_roll, token, seen).open().keys.epoch == 2
    assert Folder(tmp_path / "newest", owner.data, old_token, seen).open().version == owner.roll.version
    forged = encode_roll(owner.roll, EVE)
    with pytest.raises(SiloError, match="signature"):
        Folder(tmp_path / "forged", forged, token).open()


def test_only_a_silo_with_a_network_needs_a_membership(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path)
    silo = parse({"swarm": {"silo_owner": OWNER.peer_id}, "node": {"dir": str(tmp_path)}})
    public = parse({"node": {"dir": str(tmp_path)}})
    off = {"network": silo.network.model_copy(update={"backend": "off"})}
    with pytest.raises(SiloError, match="must be a member"):
        node_transport(silo, ANN, folder, lambda *_: UNSIGNED)
    assert node_transport(silo.model_copy(update=off), ANN, folder, lambda *_: UNSIGNED) is None
    assert not isinstance(node_transport(public, ANN, folder, lambda *_: UNSIGNED), SiloTransport)


def test_a_silo_without_a_network_has_no_transport(tmp_path: Path) -> None:
    config = parse({"swarm": {"silo_owner": OWNER.peer_id}, "node": {"dir": str(tmp_path)}})
    owner = Owner.found(OWNER, config.swarm_id, NOW)
    invite(owner, ANN, until=NOW * 2)
    folder = Folder(tmp_path, owner.data).folder
    assert silo_transport(config, ANN, folder, lambda *_: UNSIGNED, lambda *_: None) is None
    network = MemoryNetwork(random.Random(1), virtual_now)
    made = silo_transport(config, ANN, folder, lambda *_: UNSIGNED, lambda *_: MemoryTransport(network, ANN.peer_id))
    assert isinstance(made, SiloTransport)
