"""Downloads in pieces: whole and right from whoever is honest, and who lied is known."""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import RequestError, RequestFailure
from swarm.network.requests.blob_protocol import (
    PIECE_BYTES,
    BlobRequest,
    manifest_of,
    num_pieces,
    piece_length,
    serve_blobs,
)
from swarm.network.requests.transfer import MAX_STRIKES, Download, fetch
from swarm.network.transport import RequestRefused

PROTOCOL = "blob"
BLOB = random.Random(0).randbytes(5 * PIECE_BYTES + 1234)
SMALL = BLOB[:5000]
Handler = Callable[[str, bytes], Awaitable[bytes]]


def digest_of(blob: bytes) -> bytes:
    return hashlib.sha256(blob).digest()


def honest(*blobs: bytes) -> Handler:
    return serve_blobs({digest_of(blob): blob for blob in blobs or (BLOB, SMALL)}.get)


class Peers:
    """A transport as far as downloads need it: peers by name, each with a handler; counts what was asked."""

    def __init__(self, **handlers: Handler) -> None:
        self._handlers = handlers
        self.asked: list[tuple[str, int]] = []
        """(peer, offset), -1 for a manifest."""
        self.num_in_flight = 0
        self.most_in_flight = 0

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        wanted = BlobRequest.decode(request)
        self.asked.append((peer_id, wanted.offset if wanted.length else -1))
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.sleep(0)
                response = await self._handlers[peer_id]("reader", request)
        except TimeoutError:
            raise RequestError("slow", "deadline") from None
        except RequestRefused as refusal:
            raise RequestError(str(refusal), "busy" if str(refusal) == "busy" else "refused") from None
        finally:
            self.num_in_flight -= 1
        if len(response) > max_response_bytes:
            raise RequestError("too long", "oversize")
        return response

    def pieces_from(self, peer_id: str) -> list[int]:
        return sorted(offset // PIECE_BYTES for peer, offset in self.asked if peer == peer_id and offset >= 0)


def failing(reason: RequestFailure, after: int = 0, then: Handler | None = None) -> Handler:
    """Answers `after` requests and then fails, or goes on with `then` after failing once."""
    inner, count = honest(), Counter[str]()

    async def answer(peer_id: str, request: bytes) -> bytes:
        count["asked"] += 1
        if count["asked"] <= after:
            return await inner(peer_id, request)
        if then is not None and count["failed"]:
            return await then(peer_id, request)
        count["failed"] += 1
        raise RequestError("failed", reason)

    return answer


def lying(blob: bytes, *, bad_pieces: tuple[int, ...], false_manifest: bool) -> Handler:
    """Sends other bytes for some pieces, and perhaps a manifest that fits them."""
    false_blob = bytearray(blob)
    for index in bad_pieces:
        false_blob[index * PIECE_BYTES] ^= 1

    async def answer(peer_id: str, request: bytes) -> bytes:
        wanted = BlobRequest.decode(request)
        if wanted.length == 0:
            return manifest_of(bytes(false_blob) if false_manifest else blob)
        return bytes(false_blob[wanted.offset : wanted.offset + wanted.length])

    return answer


async def download(
    peers: Peers, holders: list[str], blob: bytes = BLOB, blamed: list[str] | None = None, **settings: object
) -> bytes:
    wanted = Download(digest_of(blob), len(blob), PROTOCOL, **settings)  # type: ignore[arg-type]
    blame = (blamed if blamed is not None else []).append
    return await fetch(peers, holders, wanted, random.Random(1), blame)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 5000, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, len(BLOB)])
async def test_blob_of_any_size_arrives_whole_in_bounded_pieces(size: int) -> None:
    blob = BLOB[:size]
    peers = Peers(a=honest(blob))
    assert await download(peers, ["a"], blob) == blob
    assert peers.pieces_from("a") == list(range(num_pieces(size)))
    assert peers.most_in_flight <= 2
    assert ("a", -1) not in peers.asked or size > PIECE_BYTES  # a small body costs one request


async def test_transfer_goes_on_with_the_next_holder_where_it_was_cut() -> None:
    peers = Peers(a=failing("cut", after=3), b=honest())
    assert await download(peers, ["a", "b"], window=1) == BLOB
    assert peers.pieces_from("b") == [2, 3, 4, 5]


async def test_holder_whose_stream_was_cut_once_goes_on_when_there_is_no_other() -> None:
    peers = Peers(a=failing("cut", after=4, then=honest()))
    assert await download(peers, ["a"], window=1) == BLOB
    assert Counter(peers.pieces_from("a")) == Counter({0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1})


@pytest.mark.parametrize("reason", ["unreachable", "refused", "oversize"])
async def test_holder_that_has_nothing_to_give_is_asked_once(reason: RequestFailure) -> None:
    peers = Peers(a=failing(reason), b=honest())
    assert await download(peers, ["a", "b"], SMALL) == SMALL
    assert peers.asked == [("a", 0), ("b", 0)]


async def test_last_failure_is_told_when_nobody_delivers() -> None:
    peers = Peers(a=failing("refused"), b=failing("unreachable"))
    with pytest.raises(RequestError) as caught:
        await download(peers, ["a", "b"], SMALL)
    assert caught.value.reason == "unreachable"
    with pytest.raises(RequestError, match="got none"):
        await download(peers, [])


async def test_busy_holder_is_asked_again_but_not_for_ever() -> None:
    peers = Peers(a=failing("busy", then=honest()))
    assert await download(peers, ["a"], SMALL) == SMALL
    peers = Peers(a=failing("cut"), b=failing("busy"))
    with pytest.raises(RequestError):
        await download(peers, ["a", "b"], SMALL)
    assert len(peers.asked) == 2 * MAX_STRIKES


async def test_wrong_bytes_of_a_small_body_are_pinned_on_their_sender() -> None:
    blamed: list[str] = []
    peers = Peers(a=lying(SMALL, bad_pieces=(0,), false_manifest=True), b=honest())
    assert await download(peers, ["a", "b"], SMALL, blamed) == SMALL
    assert blamed == ["a"]


async def test_short_answer_is_no_piece() -> None:
    async def short(peer_id: str, request: bytes) -> bytes:
        return b""

    blamed: list[str] = []
    assert await download(Peers(a=short, b=honest()), ["a", "b"], SMALL, blamed) == SMALL
    assert await download(Peers(a=short, b=honest()), ["a", "b"], BLOB, blamed) == BLOB
    assert blamed == ["a", "a"]


async def test_bad_piece_is_noticed_at_once_and_fetched_again_alone() -> None:
    blamed: list[str] = []
    peers = Peers(a=lying(BLOB, bad_pieces=(3,), false_manifest=False), b=honest())
    assert await download(peers, ["a", "b"], BLOB, blamed, window=1) == BLOB
    assert blamed == ["a"]
    assert peers.pieces_from("a") == [0, 1, 2, 3]
    assert peers.pieces_from("b") == [3, 4, 5]


async def test_lying_manifest_costs_only_the_pieces_it_lied_about() -> None:
    blamed: list[str] = []
    peers = Peers(a=lying(BLOB, bad_pieces=(1, 4), false_manifest=True), b=honest())
    assert await download(peers, ["a", "b"], BLOB, blamed) == BLOB
    assert blamed == ["a"]
    assert peers.pieces_from("b") == [1, 4]


async def test_honest_holder_is_not_blamed_for_contradicting_a_false_manifest() -> None:
    blamed: list[str] = []
    # The liar gives its manifest and is gone; the others must not be held to it.
    false = lying(BLOB, bad_pieces=(0, 2), false_manifest=True)

    async def vanishing(peer_id: str, request: bytes) -> bytes:
        if BlobRequest.decode(request).length == 0:
            return await false(peer_id, request)
        raise RequestError("gone", "unreachable")

    peers = Peers(a=vanishing, b=honest(), c=honest())
    assert await download(peers, ["a", "b", "c"], BLOB, blamed) == BLOB
    assert blamed == ["a"]


async def test_liar_beside_an_honest_manifest_is_known_in_the_end() -> None:
    blamed: list[str] = []
    liar = lying(BLOB, bad_pieces=(2,), false_manifest=True)
    peers = Peers(a=failing("cut", after=3, then=honest()), b=liar, c=honest())
    assert await download(peers, ["a", "b", "c"], BLOB, blamed, window=1) == BLOB
    assert blamed == ["b"]


async def test_announced_manifest_makes_every_lie_visible_at_once() -> None:
    blamed: list[str] = []
    peers = Peers(a=lying(BLOB, bad_pieces=(1,), false_manifest=True), b=honest())
    bound = digest_of(manifest_of(BLOB))
    assert await download(peers, ["a", "b"], BLOB, blamed, manifest_digest=bound) == BLOB
    assert blamed == ["a"]
    assert peers.pieces_from("a") == []
    with pytest.raises(RequestError) as caught:
        await download(Peers(b=honest()), ["b"], BLOB, manifest_digest=bytes(32))
    assert caught.value.reason == "damaged"


async def test_only_liars_end_in_damaged() -> None:
    blamed: list[str] = []
    names = [f"liar{number}" for number in range(3)]
    liars = [lying(BLOB, bad_pieces=(number,), false_manifest=True) for number in range(3)]
    with pytest.raises(RequestError) as caught:
        await download(Peers(**dict(zip(names, liars, strict=True))), names, BLOB, blamed)
    assert caught.value.reason == "damaged"
    assert sorted(blamed) == names


async def test_a_lost_connection_is_one_failure_however_much_was_under_way() -> None:
    under_way: list[asyncio.Event] = []
    serve, num_lost = honest(), 0

    async def unsteady(peer_id: str, request: bytes) -> bytes:
        nonlocal num_lost
        if num_lost == MAX_STRIKES - 1:
            return await serve(peer_id, request)
        under_way.append(lost := asyncio.Event())
        if len(under_way) == 4:
            num_lost += 1
            for event in under_way:
                event.set()
            under_way.clear()
        await lost.wait()
        raise RequestError("cut off", "cut")

    async def first_the_manifest(peer_id: str, request: bytes) -> bytes:
        return await (serve if request == BlobRequest(digest_of(BLOB)).encode() else unsteady)(peer_id, request)

    assert await download(Peers(a=first_the_manifest), ["a"], BLOB, window=4) == BLOB
    assert num_lost == MAX_STRIKES - 1


async def test_silent_holder_costs_one_deadline_of_a_piece() -> None:
    async def silent(peer_id: str, request: bytes) -> bytes:
        return await asyncio.get_running_loop().create_future()

    peers = Peers(a=silent, b=honest())
    assert await download(peers, ["a", "b"], SMALL, base_timeout_s=0.05) == SMALL
    with pytest.raises(RequestError) as caught:
        await download(Peers(a=silent), ["a"], SMALL, base_timeout_s=0.05)
    assert caught.value.reason == "deadline"


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_one_honest_holder_among_any_is_enough(seed: int) -> None:
    rng = random.Random(seed)
    handlers: dict[str, Handler] = {"honest": honest()}
    for number in range(rng.randint(0, 4)):
        bad = tuple(rng.sample(range(6), rng.randint(1, 6)))
        reason = rng.choice(["refused", "unreachable", "oversize"])
        kinds = [lying(BLOB, bad_pieces=bad, false_manifest=rng.random() < 0.5), failing(reason, rng.randint(0, 4))]
        handlers[f"peer{number}"] = rng.choice(kinds)
    holders = rng.sample(sorted(handlers), len(handlers))
    blamed: list[str] = []
    assert asyncio.run(download(Peers(**handlers), holders, BLOB, blamed, window=rng.randint(1, 4))) == BLOB
    assert "honest" not in blamed


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        digest_of(BLOB),
        BlobRequest(bytes(32), 0, 1).encode(),
        BlobRequest(digest_of(BLOB), 0, PIECE_BYTES + 1).encode(),
        BlobRequest(digest_of(BLOB), len(BLOB), 1).encode(),
        BlobRequest(digest_of(BLOB), 2**64 - 1, 1).encode(),
        BlobRequest(digest_of(BLOB), 1, 0).encode(),
        BlobRequest(digest_of(SMALL), 0, len(SMALL) + 1).encode(),
    ],
)
async def test_range_that_does_not_exist_is_refused(request_bytes: bytes) -> None:
    with pytest.raises(RequestRefused):
        await honest()("reader", request_bytes)


async def test_served_bytes_are_as_documented() -> None:
    serve = honest()
    assert await serve("reader", digest_of(BLOB) + (7).to_bytes(8, "big") + (5).to_bytes(4, "big")) == BLOB[7:12]
    manifest = await serve("reader", digest_of(BLOB) + bytes(12))
    last = digest_of(BLOB[5 * PIECE_BYTES :])
    assert (len(manifest), manifest[-32:], manifest[:32]) == (6 * 32, last, digest_of(BLOB[:PIECE_BYTES]))
    assert piece_length(5, len(BLOB)) == 1234


def test_impossible_download_is_a_mistake() -> None:
    for digest, num_bytes in [(b"", 5), (bytes(32), 0), (bytes(32), 1 << 40)]:
        with pytest.raises(ValueError, match="a blob must have"):
            asyncio.run(fetch(Peers(), [], Download(digest, num_bytes, PROTOCOL), random.Random(0)))  # type: ignore[arg-type]
