"""Connected peers share an index while no host of the real one can be reached, and believe each other nothing."""

from swarm.errors import RequestError
from swarm.network.index_entry import UNSIGNED, IndexRule, Validity
from swarm.network.index_gateway import IndexGateway
from swarm.network.peer_index import NUM_ASKED, IndexShare, PeerIndex, ServedShare
from swarm.network.transport import RequestRefused

NOW = 1_000.0


def only_honest(key: str, subkey: str, value: bytes) -> Validity | None:
    return None if value == b"forged" else UNSIGNED


class Peers:
    """Nodes that reach each other by calling each other's gateway."""

    def __init__(self, *names: str) -> None:
        self.asked: list[str] = []
        self.now = NOW
        self.outsiders: set[str] = set()
        self._gateways: dict[str, IndexGateway] = {}
        self.nodes = {name: self._add(name) for name in names}

    def _add(self, name: str) -> PeerIndex:
        async def ask(peer_id: str, request: bytes) -> bytes:
            self.asked.append(peer_id)
            if peer_id not in self._gateways:
                raise RequestError("gone", "unreachable")
            try:
                return await self._gateways[peer_id].answer(name, request)
            except RequestRefused as refusal:
                raise RequestError(str(refusal), "refused") from None

        rule = IndexRule(only_honest, lambda: self.now)
        node = PeerIndex(rule, lambda: self.now, ask, lambda peer, _: peer not in self.outsiders)
        self._gateways[name] = IndexGateway(ServedShare(node), rule)
        return node


async def test_entry_reaches_whoever_asks_the_peers_that_took_it() -> None:
    peers = Peers("a", "b", "c")
    a, b, c = peers.nodes.values()
    assert await a.store("key", "a/0", b"value", expires_at=NOW + 60, peers=["b", "gone"])
    assert await c.load("key", peers=["b"]) == {"a/0": b"value"}
    assert await b.load("key", peers=[]) == {"a/0": b"value"}
    peers.now += 61
    assert await c.load("key", peers=["b"]) == {}


async def test_entry_that_nobody_took_stays_here_and_counts_as_not_stored() -> None:
    peers = Peers("a", "b")
    a, b = peers.nodes.values()
    assert not await a.store("key", "a/0", b"value", expires_at=NOW + 60, peers=["gone"])
    assert await b.load("key", peers=["a"]) == {"a/0": b"value"}


async def test_peer_that_is_asked_asks_nobody() -> None:
    peers = Peers("a", "b", "c")
    await peers.nodes["a"].store("key", "a/0", b"value", expires_at=NOW + 60, peers=[])
    assert await peers.nodes["c"].load("key", peers=["b"]) == {}
    assert peers.asked == ["b"]


async def test_forged_entry_is_neither_kept_nor_believed() -> None:
    peers = Peers("a", "b", "liar")
    peers.nodes["liar"]._rule = IndexRule(None, lambda: NOW)
    assert not await peers.nodes["liar"].store("key", "a/0", b"forged", expires_at=NOW + 60, peers=["b"])
    assert await peers.nodes["liar"].load("key", peers=[]) == {"a/0": b"forged"}
    assert await peers.nodes["a"].load("key", peers=["b", "liar"]) == {}


async def test_only_a_few_peers_and_no_outsiders_are_asked() -> None:
    peers = Peers("a")
    peers.outsiders = {"outsider"}
    await peers.nodes["a"].load("key", peers=["outsider", *(f"peer{number}" for number in range(20))])
    assert peers.asked == [f"peer{number}" for number in range(NUM_ASKED)]


def test_full_share_takes_room_from_the_author_that_holds_most() -> None:
    share = IndexShare(lambda: NOW, max_entries=4)

    def put(subkey: str, created_at: float) -> bool:
        return share.take("key", subkey, b"", Validity(created_at, NOW + 60, (created_at, 0, b"")))

    assert all(put(f"many/{number}", number) for number in range(3))
    assert put("one/0", 0.0)
    assert put("other/0", 0.0)
    assert set(share.get("key")) == {"many/1", "many/2", "one/0", "other/0"}
    assert put("third/0", 0.0)
    assert not put("fourth/0", 0.0), "nobody holds more than it would"
