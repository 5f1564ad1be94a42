"""Whom a member asks for the roll, when, with which version and grant, and what becomes of the answers."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.errors import SiloError
from swarm.network.memory.network import MemoryNetwork
from swarm.network.memory.transport import MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.network.transport import RequestRefused
from swarm.records.identity import Identity
from swarm.records.signing import pack
from swarm.silo.bulletin import (
    BULLETIN_PROTOCOL,
    MAX_BULLETIN_BYTES,
    MAX_BULLETIN_REQUEST_BYTES,
    Bulletin,
    decode_bulletin,
    decode_question,
    encode_bulletin,
    encode_question,
)
from swarm.silo.grant import MAX_GRANT_BYTES, Token, decode_token
from swarm.silo.membership import MAX_GRANTS, Membership
from swarm.silo.owner import Owner
from swarm.silo.roll import MAX_ROLL_BYTES, Member, encode_roll
from swarm.silo.sealing import BOX_OVERHEAD_BYTES, box, box_key, open_box
from swarm.silo.silo_files import SeenRolls, SiloFiles
from tests.unit.silo_factory import NOW, OWNER, SILO_ID, found, identity_of, invite

ANN, BEN, CAT, EVE, NEW = (identity_of(number) for number in range(5))
MANY = [Identity(number.to_bytes(32, "big")) for number in range(1, 41)]
Reply = Callable[[str], bytes]


def no_news(caller: str) -> bytes:
    return news()


def news(roll: bytes = b"", *grants: bytes) -> bytes:
    """An answer for Ann."""
    return box(box_key(ANN).public_key().public_bytes_raw(), encode_bulletin(roll, grants), b"bulletin")


class Asked(MemoryTransport):
    """A peer that notes when it is asked, and with what."""

    def __init__(self, network: MemoryNetwork, identity: Identity, reply: Reply = no_news) -> None:
        super().__init__(network, identity.peer_id)
        self.times: list[float] = []
        self.questions: list[tuple[int, bytes]] = []
        self.reply = reply
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.serve(BULLETIN_PROTOCOL, self._answer, max_request_bytes=MAX_BULLETIN_REQUEST_BYTES)

    async def _answer(self, caller: str, request: bytes) -> bytes:
        self.times.append(self.now() - NOW)
        self.questions.append(decode_question(request))
        await self.may_answer.wait()
        return self.reply(caller)


class Lab:
    """A network with Ann, who has a bulletin, and peers that are asked."""

    def __init__(self, folder: Path, roll: bytes = b"", token: Token | None = None, entrances: tuple[str, ...] = ()):
        self.network = MemoryNetwork(random.Random(1), virtual_now)
        self.ann = MemoryTransport(self.network, ANN.peer_id)
        self.membership = Membership(SILO_ID, OWNER.peer_id, ANN, virtual_now, SeenRolls(SILO_ID))
        if token is not None:
            self.membership.accept_own_grant(token.grant.data, token.wrapped)
        if roll:
            self.membership.accept_roll(roll)
        self.files = SiloFiles(folder)
        self.bulletin = Bulletin(self.ann, self.membership, ANN, self.files, entrances=entrances, rng=random.Random(1))

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Ann is connected, and her bulletin works."""
        await self.ann.start()
        work = asyncio.create_task(self.bulletin.work())
        yield
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await self.ann.stop()

    async def peers(self, *identities: Identity, reply: Reply = no_news) -> list[Asked]:
        peers = [Asked(self.network, identity, reply) for identity in identities]
        for peer in peers:
            await peer.start()
        return peers

    async def asked(self, reply: Reply, times: int = 1) -> Asked:
        """Ben, after Ann has asked him so often."""
        await self.ann.start()
        (ben,) = await self.peers(BEN, reply=reply)
        for _ in range(times):
            await self.bulletin.ask(BEN.peer_id)
        return ben


def full_roll() -> bytes:
    """A roll that lists Ann and many others."""
    roll = found(ANN).roll
    others = (Member(one.peer_id, b"x" * 32, roll.members[0].until, bytes(80)) for one in MANY)
    return encode_roll(replace(roll, members=(*roll.members, *others)), OWNER)


def test_the_longest_question_and_bulletin_fit_their_bounds() -> None:
    assert len(encode_question(2**53, bytes(MAX_GRANT_BYTES))) <= MAX_BULLETIN_REQUEST_BYTES
    longest = encode_bulletin(bytes(MAX_ROLL_BYTES), [bytes(MAX_GRANT_BYTES)] * MAX_GRANTS)
    assert len(longest) + BOX_OVERHEAD_BYTES <= MAX_BULLETIN_BYTES
    assert decode_bulletin(longest)[0] == bytes(MAX_ROLL_BYTES)


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [([1, 2**53, b""], True), ([1, 2**53 + 1, b""], False), ([1, 0, b""], True), ([1, -1, b""], False),
     ([2, 1, b""], False), ([1, 1], False), ([1, 1, b"", b""], False), ([1, 1, "text"], False)],
)  # fmt: skip
def test_a_question_names_a_version_and_a_grant(fields: list[object], is_valid: bool) -> None:
    if is_valid:
        assert decode_question(pack(fields)) == (fields[1], fields[2])
    else:
        with pytest.raises(SiloError, match="a question for a silo's roll must be valid"):
            decode_question(pack(fields))


@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_who_asks_gets_a_newer_roll_and_is_asked_for_one(tmp_path: Path, difference: int) -> None:
    async def main() -> None:
        roll = found(ANN, BEN).data
        lab = Lab(tmp_path, roll)
        (ben,) = await lab.peers(BEN)
        async with lab.at_work():
            await asyncio.sleep(5)
            ben.times.clear()
            question = encode_question(lab.membership.version + difference, b"")
            boxed = await lab.bulletin.answer(BEN.peer_id, question)
            answer = decode_bulletin(open_box(box_key(BEN), boxed, b"bulletin"))
            assert answer == (roll if difference < 0 else b"", [])
            await asyncio.sleep(0.5)
            assert len(ben.times) == (difference > 0)

    run(main())


@pytest.mark.parametrize("is_later", [False, True], ids=["same epoch", "later epoch"])
def test_a_grant_of_a_later_epoch_shows_who_has_a_newer_roll(tmp_path: Path, is_later: bool) -> None:
    async def main() -> None:
        owner = found(ANN)
        lab = Lab(tmp_path, owner.data)
        if is_later:
            owner.rotate(NOW)
        grant = decode_token(invite(owner, NEW)).grant.data
        (new,) = await lab.peers(NEW)
        async with lab.at_work():
            await asyncio.sleep(5)
            assert not new.times, "nobody knows it"
            answer = lab.bulletin.answer(NEW.peer_id, encode_question(0, grant))
            if is_later:
                with pytest.raises(RequestRefused, match="not a member"):
                    await answer
            else:
                await answer
            assert lab.membership.is_member(NEW.peer_id) is not is_later
            await asyncio.sleep(0.5)
            assert len(new.times) == is_later

    run(main())


def test_who_joined_before_a_rotation_still_gets_the_newer_roll(tmp_path: Path) -> None:
    """It shows a grant of the epoch that is over until it has a roll of the next one."""

    async def main() -> None:
        owner = found(ANN)
        grants = {member: decode_token(invite(owner, member)).grant.data for member in (BEN, EVE)}
        owner.revoke(EVE.peer_id, NOW)
        lab = Lab(tmp_path, owner.data)
        boxed = await lab.bulletin.answer(BEN.peer_id, encode_question(2, grants[BEN]))
        assert decode_bulletin(open_box(box_key(BEN), boxed, b"bulletin"))[0] == owner.data
        with pytest.raises(RequestRefused, match="not a member: old"):
            await lab.bulletin.answer(EVE.peer_id, encode_question(2, grants[EVE]))

    run(main())


def test_a_newcomer_without_a_roll_vouches_for_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        owner = found(CAT)
        lab = Lab(tmp_path, token=decode_token(invite(owner, ANN)))
        grant = decode_token(invite(owner, BEN)).grant.data
        for request in (encode_question(0, grant), encode_question(0, b""), b"no question"):
            with pytest.raises(RequestRefused, match="not a member"):
                await lab.bulletin.answer(BEN.peer_id, request)
        with pytest.raises(RequestRefused, match="the grant of another"):
            await lab.bulletin.answer(EVE.peer_id, encode_question(0, grant))

    run(main())


def test_the_first_questions_name_the_version_before_so_that_equal_versions_are_compared(tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(tmp_path, found(ANN, BEN).data)
        ben = await lab.asked(no_news, times=10)
        assert [version for version, _ in ben.questions] == [2] * 8 + [3] * 2

    run(main())


def test_a_newcomer_shows_its_grant_until_a_roll_of_a_later_epoch(tmp_path: Path) -> None:
    async def main() -> None:
        owner = found(BEN)
        token = decode_token(invite(owner, ANN))
        lab = Lab(tmp_path, token=token)
        ben = await lab.asked(no_news, times=10)
        assert ben.questions == [(0, token.grant.data)] * 10
        for is_shown in (True, False):
            lab.membership.accept_roll(owner.data)
            await lab.bulletin.ask(BEN.peer_id)
            assert ben.questions[-1][1] == (token.grant.data if is_shown else b"")
            owner.rotate(NOW)

    run(main())


def test_grants_and_newer_rolls_are_accepted_and_a_roll_is_written(tmp_path: Path) -> None:
    async def main() -> None:
        owner = found(ANN, BEN)
        lab = Lab(tmp_path, owner.data)
        grant = decode_token(invite(owner, CAT)).grant.data
        replies = iter([news(b"", b"no grant", grant), news(owner.data), news()])
        await lab.asked(lambda _: next(replies))
        assert [one.peer_id for one in lab.membership.grants] == [CAT.peer_id] and lab.files.read_roll() is None
        for _ in range(2):
            await lab.bulletin.ask(BEN.peer_id)
            assert lab.membership.roll_data == lab.files.read_roll() == owner.data
        assert not lab.membership.grants and not lab.bulletin.faults

    run(main())


def test_several_refusals_in_a_row_of_a_stranger_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(message: str) -> Reply:
        def reply(caller: str) -> bytes:
            raise RequestRefused(message)

        return reply

    def num_warnings() -> int:
        return sum("no longer a member" in record.message for record in caplog.records)

    async def main() -> None:
        lab = Lab(tmp_path, found(ANN, BEN).data)
        ben = await lab.asked(refusing("the grant of another"), times=3)
        await lab.bulletin.ask(CAT.peer_id)  # not there
        assert num_warnings() == 0
        for reply, expected in [
            (refusing("not a member"), 0), (no_news, 0), (refusing("not a member"), 0),
            (refusing("not a member: forged"), 1), (refusing("not a member"), 1),
        ]:  # fmt: skip
            ben.reply = reply
            await lab.bulletin.ask(BEN.peer_id)
            assert num_warnings() == expected

    run(main())


def test_one_member_cannot_tell_a_node_that_it_was_removed_while_another_is_there(tmp_path: Path) -> None:
    def refuse(caller: str) -> bytes:
        raise RequestRefused("not a member")

    async def main() -> None:
        lab = Lab(tmp_path, found(ANN, BEN, CAT).data)
        _, cat = await lab.peers(BEN, CAT, reply=refuse)
        async with lab.at_work():
            cat.may_answer.clear()
            await asyncio.sleep(60)
            assert lab.bulletin.advice() == ()
            cat.may_answer.set()
            await asyncio.sleep(60)
            assert any("no longer a member" in line for line in lab.bulletin.advice())

    run(main())


def test_two_rolls_of_one_version_are_one_warning_and_other_faults_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        owner = found(ANN, BEN)
        other = Owner(OWNER, owner.roll)
        owner.rotate(NOW)
        other.rotate(NOW)
        lab = Lab(tmp_path, owner.data)
        forged = encode_roll(replace(owner.roll, version=99), EVE)
        replies = iter([forged, other.data, forged, other.data])
        num_warnings = []
        await lab.asked(lambda _: news(next(replies)), times=0)
        for _ in range(4):
            await lab.bulletin.ask(BEN.peer_id)
            num_warnings.append(sum(record.levelno >= logging.WARNING for record in caplog.records))
        assert num_warnings == [0, 1, 1, 1] and lab.bulletin.faults == {"forged": 2, "two_rolls": 2}
        assert any("one roll of version" in record.message for record in caplog.records)

    run(main())


def test_new_members_are_asked_at_the_next_interval_and_then_one_at_a_time(tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(tmp_path, full_roll())
        peers = await lab.peers(*MANY[:3], EVE)
        async with lab.at_work():
            await asyncio.sleep(15)
            assert [peer.times[0] for peer in peers[:3]] == [1, 1, 1]
            assert sorted(time for peer in peers for time in peer.times) == [1, 1, 1, 11]
            new = await lab.peers(*MANY[3:6])
            await asyncio.sleep(20)
            assert [peer.times[0] for peer in new] == [21, 21, 21]
            times = [time for peer in (*peers, *new) for time in peer.times if time > 11]
            assert times.count(21) in (3, 4) and times.count(31) == 1 and set(times) == {21, 31}
            assert not peers[3].times, "no member"

    run(main())


def test_all_are_asked_once_the_roll_has_changed(tmp_path: Path) -> None:
    async def main() -> None:
        owner = found(ANN, BEN, CAT)
        lab = Lab(tmp_path, owner.data)
        peers = await lab.peers(BEN, CAT)
        async with lab.at_work():
            await asyncio.sleep(3.5)
            owner.rotate(NOW)
            lab.files.write_roll(owner.data)
            await asyncio.sleep(3)
            assert lab.membership.version == owner.roll.version, "it was on the disk"
            assert [peer.times for peer in peers] == [[1, 4], [1, 4]]

    run(main())


@pytest.mark.parametrize("has_roll", [False, True], ids=["newcomer", "member"])
def test_who_is_alone_asks_the_entrances_each_second(tmp_path: Path, has_roll: bool) -> None:
    async def main() -> None:
        owner = found(BEN)
        token = decode_token(invite(owner, ANN))
        entrances = (ANN.peer_id, EVE.peer_id)
        lab = Lab(tmp_path, owner.data if has_roll else b"", token, entrances)
        (entrance,) = await lab.peers(EVE)
        async with lab.at_work():
            await asyncio.sleep(4.5)
            assert entrance.times == [1, 2, 3, 4]

    run(main())


def test_a_peer_is_asked_soon_at_most_once_a_second(tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(tmp_path, found(ANN, BEN).data)
        (ben,) = await lab.peers(BEN)
        async with lab.at_work():
            for _ in range(7):
                lab.bulletin.ask_soon(BEN.peer_id)
                await asyncio.sleep(0.5)
            assert ben.times == [0, 1, 2, 3]

    run(main())


def test_slow_peers_are_asked_once_at_a_time_and_only_so_many_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(tmp_path, full_roll())
        peers = await lab.peers(*MANY)
        for peer in peers:
            peer.may_answer.clear()
        async with lab.at_work():
            await asyncio.sleep(3)
            for peer in peers:
                lab.bulletin.ask_soon(peer.peer_id)
            await asyncio.sleep(1)
            assert sorted(len(peer.times) for peer in peers) == [0] * 8 + [1] * 32
            for peer in peers:
                peer.may_answer.set()
            await asyncio.sleep(20)
            assert all(peer.times for peer in peers)

    run(main())


def test_the_roll_on_disk_counts_where_it_is_newer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        owner = found(ANN, BEN)
        lab = Lab(tmp_path, owner.data)
        lab.bulletin.read_file()  # there is none
        invite(owner, CAT)
        lab.files.write_roll(owner.data)
        lab.bulletin.read_file()
        assert lab.membership.is_member(CAT.peer_id) and not caplog.records
        for text in (owner.data, b"damaged"):
            lab.files.write_roll(text)
            for _ in range(2):
                lab.bulletin.read_file()
        assert lab.bulletin.faults == {"malformed": 1}
        assert len(caplog.records) == 1 and "the roll in this node's folder is ignored" in caplog.records[0].message

    run(main())
