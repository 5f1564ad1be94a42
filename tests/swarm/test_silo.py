"""A silo lets nobody in and nothing out: members learn from each other, and who is none gets nothing and brings nothing."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.errors import RequestError
from swarm.network.commands.caller import CommandCaller
from swarm.network.commands.envelope import CommandChannel
from swarm.network.commands.service import CommandService
from swarm.network.index_entry import check_entry
from swarm.network.memory.transport import MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.network.transport import ValidationResult
from swarm.records.codec import encode_record
from swarm.records.identity import Identity
from swarm.records.signing import sign_record
from swarm.sharing.body_store import BODY_PROTOCOL
from swarm.sharing.index import EntryValidator, Shard, experience_key, experience_topic, presence_key
from swarm.silo.bulletin import BULLETIN_PROTOCOL, decode_bulletin, encode_question
from swarm.silo.grant import decode_token
from swarm.silo.membership import GRACE_S
from swarm.silo.owner import Owner
from swarm.silo.sealing import EpochKey, box_key, open_box
from swarm.silo.silo_files import SiloFiles
from swarm.silo.silo_transport import SealedIndex, SiloTransport
from swarm.simulation.light_node import SOURCE
from tests.swarm.silo_swarm import SiloSwarm
from tests.unit.silo_factory import DAY_S, NAME, OWNER, SILO_ID, found, identity_of, invite

ANN, BEN, CAT, EVE, NEW = (identity_of(number) for number in range(5))
MEMBERS = (ANN, BEN, CAT)
EVERYBODY = Shard(0, 0)
UNTIL = 2e9 + DAY_S


def test_members_learn_from_each_other_and_nothing_is_readable_on_the_wire(tmp_path: Path) -> None:
    async def main() -> SiloSwarm:
        silo, owner = SiloSwarm(tmp_path), found(*MEMBERS, until=UNTIL)
        for member in MEMBERS:
            silo.add(member, owner)
        await silo.start()
        await silo.let(45)
        await silo.stop()
        return silo

    silo = run(main())
    for member in MEMBERS:
        node = silo.nodes[member.peer_id]
        others = {other.peer_id for other in MEMBERS if other is not member}
        assert set(node.trained_authors) == others and node.num_groups_trained > 10
        assert not node.transport.refused and not node.rejected
    wire, said = b"\n".join(silo.ears.wire), {text for text in silo.ears.plain if len(text) >= 16}
    assert len(said) > 50 and len(silo.ears.wire) > 500
    assert not [text[:60] for text in said if text in wire]
    for secret in (SILO_ID.encode(), bytes.fromhex(SILO_ID), b"experience", b"presence", SOURCE.encode()):
        assert secret in b"\n".join(silo.ears.plain)
        assert secret not in wire
    assert NAME.encode() not in wire


def test_outsider_with_manifest_and_addresses_gets_nothing_and_brings_nothing_in(tmp_path: Path) -> None:
    """It knows who the members are, the silo's name and id, and speaks all protocols; it has no key."""

    async def main() -> None:
        silo, owner = SiloSwarm(tmp_path), found(*MEMBERS, until=UNTIL)
        for member in MEMBERS:
            silo.add(member, owner)
        await silo.start()
        heard: list[bytes] = []
        eve = MemoryTransport(silo.network, EVE.peer_id)
        eve.subscribe(
            experience_topic(SILO_ID, EVERYBODY), lambda peer, message: heard.append(message) or ValidationResult.ACCEPT
        )
        await eve.start()
        await silo.let(20)
        for protocol, request in [
            (BULLETIN_PROTOCOL, encode_question(0, b"")),
            (BULLETIN_PROTOCOL, encode_question(0, decode_token(invite(found(ANN), NEW, UNTIL)).grant.data)),
            (BODY_PROTOCOL, bytes(32)),
            (BODY_PROTOCOL, EpochKey(b"e" * 32, 1).seal(BODY_PROTOCOL, bytes(32), b"")),
        ]:
            with pytest.raises(RequestError, match=r"refused: (not a member|the grant of another)"):
                await eve.request(ANN.peer_id, protocol, request, max_response_bytes=1 << 20, deadline_s=5)
        assert not heard
        assert await eve.load(presence_key(SILO_ID, EVERYBODY)) == {}
        # What members wrote under plain names, were it there, and what Eve made up herself:
        made_up = EpochKey(b"e" * 32, 1)
        for key in (experience_key(SILO_ID, EVERYBODY, virtual_now()), made_up.hidden("x")):
            value = made_up.seal("index", b"x\0y", f"{key}/{EVE.peer_id}".encode())
            assert not await eve.store(key, EVE.peer_id, value, virtual_now() + 60) or _only_own_share(silo, key)
        await eve.publish(experience_topic(SILO_ID, EVERYBODY), b"spam")
        await silo.let(20)
        for member in MEMBERS:
            assert EVE.peer_id not in silo.nodes[member.peer_id].trained_authors
            assert EVE.peer_id not in await silo.nodes[member.peer_id].transport.connected_peers()
            assert not silo.nodes[member.peer_id].rejected
        await eve.stop()
        await silo.stop()

    run(main())


def _only_own_share(silo: SiloSwarm, key: str) -> bool:
    """Whether no member keeps an entry: Eve keeps what she likes in her own share of the index."""
    shares = [node.transport._inner.index_share for node in silo.nodes.values()]  # type: ignore[attr-defined]
    return not any(share.get(key) for share in shares)


def test_revoked_member_is_out_within_seconds_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        silo, owner = SiloSwarm(tmp_path), found(*MEMBERS, until=UNTIL)
        for member in MEMBERS:
            silo.add(member, owner)
        await silo.start()
        await silo.let(20)
        owner.revoke(CAT.peer_id, virtual_now())
        SiloFiles(silo.folder(ANN)).write_roll(owner.data)  # what `swarm silo revoke` does
        await silo.let(4)
        assert [silo.memberships[one.peer_id].keys.epoch for one in MEMBERS] == [2, 2, 1]
        assert SiloFiles(silo.folder(BEN)).read_roll() == owner.data, "it survives a restart of Ben's node"
        silo.ears.wire.clear()
        sealed_before = len(silo.ears.plain)
        await silo.let(130)  # the time of grace, and some more
        ann, ben, cat = (silo.nodes[one.peer_id] for one in MEMBERS)
        before = [dict(node.trained_authors) for node in (ann, ben, cat)]
        await silo.let(40)
        assert len(silo.ears.plain) > sealed_before
        assert ann.trained_authors[BEN.peer_id] > before[0][BEN.peer_id] + 5
        assert ben.trained_authors[ANN.peer_id] > before[1][ANN.peer_id] + 5
        assert ann.trained_authors[CAT.peer_id] == before[0][CAT.peer_id]
        assert ben.trained_authors[CAT.peer_id] == before[1][CAT.peer_id]
        assert dict(cat.trained_authors) == before[2], "nothing new came to Cat"
        with pytest.raises(RequestError, match="refused: not a member"):
            await cat.transport.request(ANN.peer_id, BODY_PROTOCOL, bytes(32), max_response_bytes=100, deadline_s=5)
        assert CAT.peer_id not in await ann.transport.connected_peers()
        assert await cat.transport.connected_peers() == (), "so its status does not say that it contributes"
        told = [record.message for record in caplog.records if "no longer a member: " in record.message]
        assert len(told) == 1, "Cat is told, once"
        await silo.stop()

    run(main())


def test_newcomer_joins_through_one_member_while_the_owner_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        silo, owner = SiloSwarm(tmp_path), found(*MEMBERS, until=UNTIL)
        for member in MEMBERS:
            silo.add(member, owner)
        await silo.start()
        await silo.let(10)
        token = invite(owner, NEW, UNTIL)  # the owner's new roll reaches nobody
        newcomer = silo.add(NEW, None, token, entrance=BEN.peer_id)
        await newcomer.start()
        await silo.let(60)
        assert set(newcomer.trained_authors) == {one.peer_id for one in MEMBERS}
        assert all(silo.nodes[one.peer_id].trained_authors[NEW.peer_id] > 0 for one in MEMBERS)
        assert silo.memberships[NEW.peer_id].version == owner.roll.version - 1
        await silo.stop()

    run(main())


def test_bulletin_is_boxed_for_the_member_that_asks(tmp_path: Path) -> None:
    async def main() -> None:
        silo, owner = SiloSwarm(tmp_path), found(*MEMBERS, until=UNTIL)
        silo.add(ANN, owner)
        await silo.start()
        ben = MemoryTransport(silo.network, BEN.peer_id)
        await ben.start()
        boxed = await ben.request(
            ANN.peer_id, BULLETIN_PROTOCOL, encode_question(0, b""), max_response_bytes=1 << 20, deadline_s=5
        )
        assert decode_bulletin(open_box(box_key(BEN), boxed, b"bulletin"))[0] == owner.data
        known = await ben.request(
            ANN.peer_id,
            BULLETIN_PROTOCOL,
            encode_question(owner.roll.version, b""),
            max_response_bytes=1000,
            deadline_s=5,
        )
        assert decode_bulletin(open_box(box_key(BEN), known, b"bulletin")) == (b"", [])
        assert owner.data[20:60] not in boxed
        await ben.stop()
        await silo.stop()

    run(main())


def test_two_rolls_of_one_version_are_told_to_the_members_that_meet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The owner's key is used in two places: Ann gets one roll, Ben another one. Neither takes the other's."""

    async def main() -> None:
        silo, owner = SiloSwarm(tmp_path), found(*MEMBERS, until=UNTIL)
        for member in MEMBERS:
            silo.add(member, owner)
        await silo.start()
        await silo.let(20)
        other = Owner(OWNER, owner.roll)
        owner.revoke(CAT.peer_id, virtual_now())
        other.rotate(virtual_now())
        SiloFiles(silo.folder(ANN)).write_roll(owner.data)
        SiloFiles(silo.folder(BEN)).write_roll(other.data)
        await silo.let(60)
        assert silo.memberships[ANN.peer_id].roll_data == owner.data
        assert silo.memberships[BEN.peer_id].roll_data == other.data
        told = [record.message for record in caplog.records if "one roll of version" in record.message]
        assert told and "rotate from the folder with the right roll" in told[0]
        assert silo.nodes[ANN.peer_id].transport.refused["silo/two_rolls"] > 0
        other.rotate(virtual_now())
        SiloFiles(silo.folder(BEN)).write_roll(other.data)
        await silo.let(30)
        assert {silo.memberships[one.peer_id].roll_data for one in MEMBERS} == {other.data}, "a newer roll mends it"
        await silo.stop()

    run(main())


class Mute(MemoryTransport):
    """A member's transport that takes questions about the roll and never answers."""

    num_asked = 0

    async def hold(self, caller: str, request: bytes) -> bytes:
        Mute.num_asked += 1
        await asyncio.sleep(3600)
        return b""


def test_a_member_that_never_answers_or_speaks_of_keys_of_the_future_delays_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        silo, owner = SiloSwarm(tmp_path), found(*MEMBERS, until=UNTIL)
        for member in (ANN, BEN):
            silo.add(member, owner)
        await silo.start()
        mute = Mute(silo.network, CAT.peer_id)
        mute.serve(BULLETIN_PROTOCOL, mute.hold, max_request_bytes=1 << 20)
        await mute.start()
        await silo.let(20)
        Mute.num_asked = 0
        future = EpochKey(bytes(32), 77).seal(BODY_PROTOCOL, b"text", b"")

        async def lure() -> None:
            for _ in range(200):
                with contextlib.suppress(RequestError):
                    await mute.request(ANN.peer_id, BODY_PROTOCOL, future, max_response_bytes=100, deadline_s=1)
                await asyncio.sleep(0.05)

        luring = asyncio.create_task(lure())
        await silo.let(3)
        owner.rotate(virtual_now())
        SiloFiles(silo.folder(ANN)).write_roll(owner.data)
        began = virtual_now()
        while silo.memberships[BEN.peer_id].version < owner.roll.version:
            await silo.let(0.25)
        assert virtual_now() - began < 4
        await luring
        assert Mute.num_asked <= 20, "one question at a time, once a second at most"
        await mute.stop()
        await silo.stop()

    run(main())


def test_a_revocation_is_heard_from_the_first_member_that_comes_and_knows_of_it(tmp_path: Path) -> None:
    """Ann starts with an old roll; the revoked Cat and some other members are there already."""

    async def main() -> None:
        many = [identity_of(20 + number) for number in range(12)]
        silo, owner = SiloSwarm(tmp_path), found(*MEMBERS, *many, until=UNTIL)
        old = Owner(OWNER, owner.roll)
        for member in (ANN, CAT, *many):
            silo.add(member, old)
        owner.revoke(CAT.peer_id, virtual_now())
        silo.add(BEN, owner)
        transports = {peer_id: node.transport for peer_id, node in silo.nodes.items()}
        for peer_id, transport in transports.items():
            if peer_id != ANN.peer_id:
                transport._bulletin._next_ask_at = 1e12  # type: ignore[attr-defined]  # what Ann hears, she asked for
            if peer_id != BEN.peer_id:
                await transport.start()
        await silo.let(5)
        assert silo.memberships[ANN.peer_id].is_member(CAT.peer_id)
        await transports[BEN.peer_id].start()
        began = virtual_now()
        while silo.memberships[ANN.peer_id].is_member(CAT.peer_id):
            await silo.let(0.5)
        assert virtual_now() - began <= 12
        for transport in transports.values():
            await transport.stop()

    run(main())


@pytest.mark.parametrize("is_entrance", [True, False], ids=["entrance", "newcomer"])
def test_a_revoked_member_that_is_always_there_keeps_nobody_in_the_old_epoch(tmp_path: Path, is_entrance: bool) -> None:
    """Ann was away; of those that she knows only the revoked Cat is there. New, whom she does not know, has the newest roll."""

    async def main() -> None:
        silo, owner = SiloSwarm(tmp_path), found(ANN, CAT, until=UNTIL)
        old = Owner(OWNER, owner.roll)
        owner.revoke(CAT.peer_id, virtual_now())
        token = invite(owner, NEW, UNTIL)
        silo.add(ANN, old, entrance=NEW.peer_id if is_entrance else "")
        silo.add(CAT, old)
        silo.add(NEW, owner, None if is_entrance else token)
        await silo.start()
        began = virtual_now()
        while silo.memberships[ANN.peer_id].is_member(CAT.peer_id) and virtual_now() - began < 120:
            await silo.let(1)
        assert virtual_now() - began <= 60
        assert silo.memberships[ANN.peer_id].keys.epoch == owner.roll.epoch
        await silo.stop()

    run(main())


class Pair:
    """Two members' transports without nodes above them, to say anything with."""

    def __init__(self, folder: Path) -> None:
        self.silo = SiloSwarm(folder)
        self.owner = found(ANN, BEN, until=UNTIL)
        self.ann, self.ben = (self.silo.add(one, self.owner).transport for one in (ANN, BEN))
        self.ann_roll, self.ben_roll = (self.silo.memberships[one.peer_id] for one in (ANN, BEN))
        self.ben.serve("echo", self._echo, max_request_bytes=100)

    @staticmethod
    async def _echo(peer_id: str, request: bytes) -> bytes:
        return request[::-1]

    async def ask(self, request: bytes = b"abc") -> bytes:
        return await self.ann.request(BEN.peer_id, "echo", request, max_response_bytes=100, deadline_s=5)

    async def __aenter__(self) -> "Pair":
        await self.ann.start()
        await self.ben.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.ann.stop()
        await self.ben.stop()


def test_requests_have_the_bounds_that_they_have_without_seals(tmp_path: Path) -> None:
    async def main() -> None:
        async with Pair(tmp_path) as pair:
            assert await pair.ask(b"abc") == b"cba"
            assert len(await pair.ask(bytes(100))) == 100
            with pytest.raises(RequestError, match=r"oversize|must be <="):
                await pair.ask(bytes(101))
            with pytest.raises(ValueError, match="<= 1024 bytes"):
                await pair.ann.publish("topic", bytes(1025))
            check_entry("k" * 128, "s", bytes(1024))

    run(main())


def test_verdicts_over_sealed_gossip(tmp_path: Path) -> None:
    """Who passed it here, who made it, and under which key: each is asked before the handler is."""

    async def main() -> None:
        pair = Pair(tmp_path)
        heard: list[bytes] = []
        pair.ann.subscribe("topic", lambda peer_id, message: heard.append(message) or ValidationResult.ACCEPT)
        old = pair.ann_roll.keys.current
        by_ben, by_eve = (encode_record(sign_record(one, SILO_ID, b"payload")) for one in (BEN, EVE))

        def verdict(key: EpochKey, message: bytes, forwarder: Identity = BEN) -> ValidationResult:
            name = key.hidden("topic")
            judge = pair.ann._gossip_handler("topic", name)  # type: ignore[attr-defined]
            return judge(forwarder.peer_id, key.seal("gossip", message, name.encode()))

        assert verdict(old, by_ben) is ValidationResult.ACCEPT and heard == [by_ben]
        assert verdict(old, by_ben, forwarder=EVE) is ValidationResult.IGNORE, "a forwarder that is no member"
        assert verdict(old, by_eve) is ValidationResult.IGNORE, (
            "an author that is no member; the forwarder may not know yet"
        )
        assert verdict(old, b"no record") is ValidationResult.REJECT
        assert verdict(EpochKey(b"x" * 32, 1), by_ben) is ValidationResult.REJECT, "not the group's key"
        assert verdict(EpochKey(b"x" * 32, 9), by_ben) is ValidationResult.IGNORE, (
            "perhaps a key that is still on its way"
        )
        invite(pair.owner, CAT, UNTIL)
        pair.owner.revoke(BEN.peer_id, virtual_now())
        pair.ann_roll.accept_roll(pair.owner.data)
        assert verdict(old, by_ben, forwarder=CAT) is ValidationResult.IGNORE, (
            "in the time of grace, and of the revoked"
        )
        assert verdict(old, encode_record(sign_record(ANN, SILO_ID, b"")), forwarder=CAT) is ValidationResult.ACCEPT
        assert len(heard) == 2
        await asyncio.sleep(GRACE_S)
        assert verdict(old, encode_record(sign_record(ANN, SILO_ID, b"")), forwarder=CAT) is ValidationResult.IGNORE
        assert pair.ann.refused["silo/forged"] == 1 and pair.ann.refused["silo/stranger"] == 3

    run(main())


def test_stage_traffic_is_sealed_like_all_else(tmp_path: Path) -> None:
    """Orders to a stage of a crew, with payload and reply larger than one piece of a blob."""
    payload, reply = b"activations " * 150_000, b"gradients! " * 50_000

    async def main() -> None:
        pair = Pair(tmp_path)
        channel = CommandChannel(SILO_ID, "crew", ANN.peer_id, (BEN.peer_id,))
        caller = CommandCaller(channel, ANN, pair.ann, virtual_now)
        heard: list[tuple[str, bytes]] = []

        def carry_out(kind: str, data: bytes) -> bytes:
            heard.append((kind, data))
            return reply

        service = CommandService(channel, pair.ben, carry_out=carry_out, max_payload=lambda kind: 4 << 20)
        async with pair:
            answer = await caller.send(BEN.peer_id, "forward", payload, max_reply_bytes=1 << 20, deadline_s=60)
            await service.close()
        assert (answer, heard) == (reply, [("forward", payload)])
        wire = pair.silo.ears.wire
        assert sum(map(len, wire)) > len(payload) + len(reply)
        assert not [text for text in wire if b"activations" in text or b"gradients" in text or b"forward" in text]

    run(main())


def test_member_behind_a_rotation_catches_up_by_being_spoken_to(tmp_path: Path) -> None:
    async def main() -> None:
        async with Pair(tmp_path) as pair:
            await asyncio.sleep(15)  # both have told each other all they know
            pair.owner.rotate(virtual_now())
            pair.ann_roll.accept_roll(pair.owner.data)
            with pytest.raises(RequestError, match="refused: unknown_epoch"):
                await pair.ask()
            await asyncio.sleep(2)
            assert await pair.ask() == b"cba" and pair.ben_roll.keys.epoch == 2

    run(main())


def test_request_under_the_key_before_is_answered_under_it_in_the_time_of_grace(tmp_path: Path) -> None:
    async def main() -> None:
        async with Pair(tmp_path) as pair:
            pair.owner.rotate(virtual_now())
            pair.ben_roll.accept_roll(pair.owner.data)
            assert pair.ann_roll.keys.epoch == 1
            assert await pair.ask() == b"cba"

    run(main())


def test_a_response_to_another_request_or_of_another_peer_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with Pair(tmp_path) as pair:
            replies: list[bytes] = []
            inner = pair.ann._inner  # type: ignore[attr-defined]
            real = inner.request

            async def replayed(*arguments, **options) -> bytes:
                replies.append(await real(*arguments, **options))
                return replies[0]

            inner.request = replayed
            assert await pair.ask() == b"cba"
            with pytest.raises(RequestError, match="does not open") as caught:
                await pair.ask()
            assert caught.value.reason == "damaged"

    run(main())


def test_index_entries_open_in_their_own_place_alone(tmp_path: Path) -> None:
    silo = SiloSwarm(tmp_path)

    async def main() -> None:
        silo.add(ANN, found(ANN, BEN, until=UNTIL))
        index = SealedIndex(silo.memberships[ANN.peer_id])
        name, sealed = index.sealed("key", f"{BEN.peer_id}/1", b"value")
        assert index.opened(name, f"{BEN.peer_id}/1", sealed) == ("key", b"value")
        assert index.opened(name, f"{BEN.peer_id}/2", sealed) is None
        assert index.opened(index.sealed("other", "x", b"")[0], f"{BEN.peer_id}/1", sealed) is None
        assert index.opened(name, f"{EVE.peer_id}/1", sealed) is None
        hidden, misplaced = index.sealed("other", f"{BEN.peer_id}/1", b"value")
        assert index.opened(hidden, f"{BEN.peer_id}/1", misplaced) == ("other", b"value")
        assert index.opened("00" * 32, f"{BEN.peer_id}/1", misplaced) is None
        refused = SealedIndex(silo.memberships[ANN.peer_id], EntryValidator(SILO_ID))
        assert not refused(name, f"{BEN.peer_id}/1", sealed), "sealed by a member, and still no signed record"

    run(main())


def test_a_member_with_the_groups_key_cannot_speak_for_another(tmp_path: Path) -> None:
    """Ben seals what he likes; who asks is the connection's word, and who wrote is the record's."""

    async def main() -> None:
        silo, owner = SiloSwarm(tmp_path), found(*MEMBERS, until=UNTIL)
        for member in (ANN, CAT):
            silo.add(member, owner)
        await silo.start()
        key = silo.memberships[ANN.peer_id].keys.current
        index = SealedIndex(silo.memberships[ANN.peer_id])
        ben = MemoryTransport(silo.network, BEN.peer_id, lambda key, subkey, value: True)
        await ben.start()
        for caller, answer in ((CAT, "forged"), (ANN, "forged"), (EVE, "forged"), (BEN, "(?!forged)")):
            context = f"request/{BODY_PROTOCOL}/{caller.peer_id}/{ANN.peer_id}".encode()
            request = key.seal(BODY_PROTOCOL, bytes(32), context)
            with pytest.raises(RequestError, match=f"refused: {answer}"):
                await ben.request(ANN.peer_id, BODY_PROTOCOL, request, max_response_bytes=1 << 20, deadline_s=5)
        forged = encode_record(replace(sign_record(BEN, SILO_ID, b"payload"), author=CAT.peer_id))
        topic = key.hidden(experience_topic(SILO_ID, EVERYBODY))
        judge = silo.nodes[ANN.peer_id].transport._gossip_handler(experience_topic(SILO_ID, EVERYBODY), topic)  # type: ignore[attr-defined]
        assert judge(BEN.peer_id, key.seal("gossip", forged, topic.encode())) is ValidationResult.REJECT
        where = experience_key(SILO_ID, EVERYBODY, virtual_now())
        name, sealed = index.sealed(where, f"{CAT.peer_id}/0", forged)
        assert index.opened(name, f"{CAT.peer_id}/0", sealed) == (where, forged), "any member can seal it"
        validator = SealedIndex(silo.memberships[ANN.peer_id], EntryValidator(SILO_ID))
        assert not validator(name, f"{CAT.peer_id}/0", sealed), "and who hosts it looks into it"
        await ben.stop()
        await silo.stop()

    run(main())


def test_node_that_is_no_member_does_not_start(tmp_path: Path) -> None:
    async def main() -> None:
        silo = SiloSwarm(tmp_path)
        node = silo.add(Identity(b"z" * 32), found(ANN, until=UNTIL))
        assert isinstance(node.transport, SiloTransport)
        with pytest.raises(Exception, match="must have the group's key"):
            await node.transport.start()
        assert len(silo.network) == 0, "it has opened nothing"

    run(main())


def test_owner_key_is_no_member_by_itself() -> None:
    assert OWNER.peer_id not in {one.peer_id for one in found(ANN).roll.members}
