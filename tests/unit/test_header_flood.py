"""Strangers that send headers as fast as the rate limit lets them push out nobody else's, and get their part and no more."""

from collections import Counter

from swarm.config import SharingSection
from swarm.records.codec import (
    decode_header,
    decode_record,
    encode_body,
    encode_header,
    encode_record,
)
from swarm.records.identity import Identity
from swarm.records.signing import SignedRecord
from swarm.sharing.inbox import MAX_CANDIDATES, MAX_CANDIDATES_PER_AUTHOR, SAFE_PER_KNOWN
from swarm.sharing.index import Shard
from swarm.sharing.peer_tracker import PeerTracker
from swarm.sharing.reputation import BURST_GROUPS, KNOWN_ARE_HEARD_FOR_S, PROBATION_BODIES
from swarm.types import Header
from tests.unit.experience_factory import Clock, context_of, group, header_of, make_inbox

EVERYBODY = Shard(0, 0)
KNOWN = [Identity(bytes([1, number]) * 16).peer_id for number in range(8)]
FLOODERS = [Identity(bytes([2, number]) * 16).peer_id for number in range(16)]
FLOOD_PER_MINUTE = 230
GROUPS_PER_HEADER = 4


class Unsigned:
    """Admits whatever can be decoded: signatures and rates are not what is looked at here, and take most of the time."""

    def admit_header(self, data: bytes, place: str = "") -> Header:
        record = decode_record(data)
        return decode_header(record.payload, record.author)


class Scene:
    """An inbox whose reader knows the eight authors of KNOWN."""

    def __init__(self) -> None:
        self.clock = Clock()
        config = SharingSection()
        self.authors = PeerTracker(config, context_of(clock=self.clock))
        self.inbox = make_inbox(config, self.clock, tracker=self.authors, admits=Unsigned())  # type: ignore[arg-type]
        self._sequence = 0
        for author in KNOWN:
            for _ in range(int(PROBATION_BODIES) + 1):
                self.authors.reputation.admitted(author)

    def offer(self, author: str) -> None:
        self._sequence += 1
        groups = [group(index=self._sequence * GROUPS_PER_HEADER + i, author=author) for i in range(GROUPS_PER_HEADER)]
        now = self.clock()
        header = header_of(
            groups[:1] * GROUPS_PER_HEADER, encode_body(groups[:1]), author=author, sequence=self._sequence, created_at=now,
            expires_at=now + 600,
        )  # fmt: skip
        record = encode_record(SignedRecord(author, encode_header(header), bytes(64)))
        self.inbox.take_gossip(EVERYBODY, record)

    def pull(self, pulled: Counter[str]) -> None:
        header = self.inbox.pick()
        if header is not None:
            pulled[header.author] += len(header.groups)


def test_a_flood_within_the_rate_limit_gets_the_part_of_strangers_and_pushes_out_nobody() -> None:
    """Sixteen names at 230 headers per minute, eight known authors with one in two minutes, a body pulled every 5 s."""
    scene, pulled, num_offered = Scene(), Counter[str](), 0
    for second in range(240):
        if second % 15 == 0:  # each of the eight in its turn
            scene.offer(KNOWN[second // 15 % 8])
            num_offered += GROUPS_PER_HEADER
        for number in range(FLOOD_PER_MINUTE * len(FLOODERS) // 60):
            scene.offer(FLOODERS[number % len(FLOODERS)])
        if second % 5 == 4:
            scene.pull(pulled)
        scene.clock.now += 1.0
    of_known = sum(pulled[author] for author in KNOWN)
    of_strangers = pulled.total() - of_known
    assert of_known == num_offered, "nothing of them is lost"
    assert of_strangers <= of_known / 3 + BURST_GROUPS + GROUPS_PER_HEADER
    assert of_strangers >= of_known / 3, "strangers get their part"


def test_candidates_are_bounded_and_fresh_names_push_out_no_known_author() -> None:
    scene = Scene()
    scene.offer(KNOWN[0])
    for number in range(2 * MAX_CANDIDATES):
        scene.offer(f"name {number}")
    assert len(scene.inbox._candidates) == MAX_CANDIDATES
    assert KNOWN[0] in {header.author for header in scene.inbox._candidates.values()}


def test_a_shard_full_of_known_authors_has_room_for_new_ones_and_fresh_names_leave_each_of_them_its_newest() -> None:
    scene = Scene()
    many = [Identity(bytes([3, number]) * 16).peer_id for number in range(MAX_CANDIDATES // MAX_CANDIDATES_PER_AUTHOR)]
    for author in many:
        for _ in range(int(PROBATION_BODIES) + 1):
            scene.authors.reputation.admitted(author)
        for _ in range(MAX_CANDIDATES_PER_AUTHOR):
            scene.offer(author)
    scene.offer("newcomer")
    for author in many:
        scene.offer(author)
    assert "newcomer" in {header.author for header in scene.inbox._candidates.values()}
    for number in range(MAX_CANDIDATES):
        scene.offer(f"name {number}")
    left = Counter(header.author for header in scene.inbox._candidates.values())
    assert len(scene.inbox._candidates) == MAX_CANDIDATES
    assert {left[author] for author in many} == {SAFE_PER_KNOWN}


def test_strangers_wait_for_known_authors_only_while_these_are_heard() -> None:
    scene, pulled = Scene(), Counter[str]()
    scene.offer(KNOWN[0])
    for _ in range(16):
        scene.offer(FLOODERS[0])
    for _ in range(16):
        scene.pull(pulled)
    assert pulled[KNOWN[0]] == GROUPS_PER_HEADER
    assert pulled[FLOODERS[0]] < BURST_GROUPS + 3 * GROUPS_PER_HEADER
    scene.clock.now += KNOWN_ARE_HEARD_FOR_S + 1
    for _ in range(16):
        scene.pull(pulled)
    assert pulled[FLOODERS[0]] == 16 * GROUPS_PER_HEADER, "all that is on offer, as nobody else is there"


def test_a_body_that_is_left_for_later_costs_strangers_nothing_of_their_part() -> None:
    scene = Scene()
    scene.offer(KNOWN[0])
    assert scene.inbox.pick() is not None
    for _ in range(8):
        scene.offer(FLOODERS[0])
    for _ in range(8):  # far more groups than strangers have earned
        header = scene.inbox.pick()
        assert header is not None
        scene.inbox.give_back(header, pause_s=4.0)
        scene.inbox.answered(header.author)


def test_the_newest_headers_of_an_author_are_kept() -> None:
    scene = Scene()
    for _ in range(MAX_CANDIDATES_PER_AUTHOR + 5):
        scene.offer(FLOODERS[0])
    kept = [header.sequence for header in scene.inbox._candidates.values()]
    assert kept == list(range(6, MAX_CANDIDATES_PER_AUTHOR + 6))
