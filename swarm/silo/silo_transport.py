"""A transport for members only: it seals what leaves the node, opens what arrives, and ignores everybody else.

    all above the network ─ SiloTransport ─ any other Transport ─ the wire
                              │  ├─ names of topics and index keys → keyed hashes
                              │  ├─ messages, entries, requests, responses → sealed, bound to their context
                              │  └─ callers, authors, forwarders, holders → members, or ignored
                              └─ Bulletin: newer rolls and keys

Everything passes through it, so records, reader, merging and later additions need not know of silos. Each protocol has
a key of its own, and so have gossip and the index. What an entry or message says of its author is checked above this
transport. Here it is only checked that the author is a member now, also where it was sealed under the previous key.

Members store entries of the index under names that mean nothing to others:

    key    → hidden name (64 hex digits)            value → seal(key NUL value), bound to hidden name and subkey

The key cannot be found from its keyed hash, and a host of the index must know it to validate the entry, so it is sealed
with the value. Subkeys stay as they are: they begin with the author's peer id, which every connection shows anyway, and
the index uses them to limit what one author may hold.
"""

import asyncio
import random
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Collection

from swarm.config import Config
from swarm.errors import RequestError, SiloError
from swarm.machine.node_folder import NodeFolder
from swarm.network.index_entry import UNSIGNED, IndexValidator, Validity, check_entry
from swarm.network.make_transport import make_transport
from swarm.network.transport import (
    Admits,
    Contact,
    GossipHandler,
    Line,
    LineHandler,
    RequestHandler,
    RequestRefused,
    Transport,
    ValidationResult,
)
from swarm.records.codec import MAX_RECORD_BYTES, decode_record
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord
from swarm.silo.bulletin import BULLETIN_PROTOCOL, Bulletin
from swarm.silo.grant import decode_token
from swarm.silo.membership import Membership
from swarm.silo.sealed_line import SealedLine
from swarm.silo.sealing import OVERHEAD_BYTES, EpochKey, epoch_of
from swarm.silo.silo_files import SeenRolls, SiloFiles

_PURPOSE = "index"
_KEY_END = b"\0"


class SealedIndex:
    """The sealed index of one node. Called as a function, it validates sealed entries for the transport beneath."""

    def __init__(
        self, membership: Membership, validator: IndexValidator | None = None, refused: Counter[str] | None = None
    ) -> None:
        """`validator` judges the plain entry. `refused` counts why entries did not open."""
        self._membership = membership
        self._validator = validator
        self._refused: Counter[str] = Counter() if refused is None else refused

    def sealed(self, key: str, subkey: str, value: bytes) -> tuple[str, bytes]:
        """Return (hidden name, sealed value). Raises SiloError where this node has no key."""
        epoch_key = self._membership.keys.current
        name = epoch_key.hidden(key)
        return name, epoch_key.seal(_PURPOSE, key.encode() + _KEY_END + value, _context(name, subkey))

    def opened(self, name: str, subkey: str, sealed: bytes) -> tuple[str, bytes] | None:
        """Return (key, value); None for what no present member has sealed for this place."""
        try:
            if not self._membership.is_member(subkey.partition("/")[0]):
                raise SiloError("an entry must be of a member", "stranger")
            epoch_key = self._membership.keys.key_for(sealed)
            key_bytes, _, value = epoch_key.open(_PURPOSE, sealed, _context(name, subkey)).partition(_KEY_END)
            key = key_bytes.decode(errors="replace")
            if epoch_key.hidden(key) != name:
                raise SiloError("an entry must lie under its own key", "forged")
        except SiloError as error:
            self._refused[error.fault] += 1
            return None
        return key, value

    def __call__(self, name: str, subkey: str, sealed: bytes) -> Validity | None:
        """Return the validity of the plain entry. Every host is a member, so it can open what it stores."""
        opened = self.opened(name, subkey, sealed)
        if opened is None:
            return None
        return UNSIGNED if self._validator is None else self._validator(opened[0], subkey, opened[1])


def _context(name: str, subkey: str) -> bytes:
    return f"{name}/{subkey}".encode()


_GOSSIP = "gossip"


class SiloTransport:
    """See `network.transport.Transport`. It wraps a transport that was not started yet."""

    def __init__(
        self, inner: Transport, membership: Membership, bulletin: Bulletin, validator: IndexValidator | None = None
    ) -> None:
        """`validator` judges plain entries. The inner transport has one for sealed entries (`SealedIndex`)."""
        self.peer_id = inner.peer_id
        self.traffic = inner.traffic
        self._inner = inner
        self._membership = membership
        self._bulletin = bulletin
        self._strangers: Counter[str] = Counter()
        self._index = SealedIndex(membership, validator, self._strangers)
        self._topics: dict[str, GossipHandler] = {}
        self._joined: set[str] = set()  # names of topics that the inner transport has joined
        self._work: list[asyncio.Task[None]] = []
        membership.watch(self._update_topics)

    @property
    def refused(self) -> Counter[str]:
        faults = self._strangers + self._bulletin.faults
        return self._inner.refused + Counter({f"silo/{fault}": count for fault, count in faults.items()})

    async def start(self) -> None:
        """Raises NetworkError; SiloError for a node that is no member."""
        _ = self._membership.keys.current
        await self._inner.start()
        self._bulletin.read_file()
        self._work = [asyncio.create_task(self._bulletin.work(), name="silo-bulletin")]

    async def stop(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._work = []
        await self._inner.stop()

    def now(self) -> float:
        return self._inner.now()

    def addresses(self) -> tuple[str, ...]:
        return self._inner.addresses()

    def gossip_addresses(self) -> tuple[str, ...]:
        return self._inner.gossip_addresses()

    @property
    def hosts_index(self) -> bool:
        return self._inner.hosts_index

    def advice(self) -> tuple[str, ...]:
        return (*self._bulletin.advice(), *self._inner.advice())

    def meet(self, contact: Contact) -> None:
        if self._membership.is_member(contact.peer_id):
            self._inner.meet(contact)

    def seen_at(self, peer_id: str) -> tuple[str, ...]:
        return self._inner.seen_at(peer_id)

    async def connected_peers(self) -> tuple[str, ...]:
        """Return connected members only; none while they answer that this node is no member, as it can ask them for nothing."""
        if self._bulletin.advice():
            return ()
        return tuple(one for one in await self._inner.connected_peers() if self._membership.is_member(one))

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        check_entry(key, subkey, value)
        hidden, sealed = self._index.sealed(key, subkey, value)
        return await self._inner.store(hidden, subkey, sealed, expires_at=expires_at)

    async def load(self, key: str) -> dict[str, bytes]:
        """Load from the name of the newest key and, during the grace time, also from that of the previous one."""
        names = [epoch_key.hidden(key) for epoch_key in self._membership.keys.accepted()]
        return dict(ChainMap(*await asyncio.gather(*map(self._load_hidden, names))))

    async def _load_hidden(self, name: str) -> dict[str, bytes]:
        """Load what lies under a hidden name and opens."""
        found = await self._inner.load(name)
        opened = {subkey: self._index.opened(name, subkey, sealed) for subkey, sealed in found.items()}
        return {subkey: entry[1] for subkey, entry in opened.items() if entry is not None}

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        async def answer(caller: str, sealed: bytes) -> bytes:
            if not self._membership.is_member(caller):
                raise self._refusal("stranger")
            context = _request_context(protocol, caller, self.peer_id)
            try:
                key = self._membership.keys.key_for(sealed)
                request = key.open(protocol, sealed, context)
            except SiloError as error:
                self._check_epoch(caller, sealed, error)
                raise self._refusal(error.fault) from None
            response = await handler(caller, request)
            return key.seal(protocol, response, _response_context(context, sealed))

        self._inner.serve(protocol, answer, max_request_bytes=max_request_bytes + OVERHEAD_BYTES)

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        what = f"request {protocol} to {peer_id} failed"
        if not self._membership.is_member(peer_id):
            raise RequestError(f"{what}: not a member", "refused")
        key, context = self._key(what), _request_context(protocol, self.peer_id, peer_id)
        sealed = key.seal(protocol, request, context)
        response = await self._inner.request(
            peer_id, protocol, sealed, max_response_bytes=max_response_bytes + OVERHEAD_BYTES, deadline_s=deadline_s
        )
        try:
            return key.open(protocol, response, _response_context(context, sealed))
        except SiloError as error:
            self._strangers[error.fault] += 1
            raise RequestError(f"{what}: {error}", "damaged") from None

    def serve_lines(self, protocol: str, handler: LineHandler) -> None:
        async def serve(line: Line) -> None:
            if not self._membership.is_member(line.peer_id):
                raise self._refusal("stranger")
            await handler(self._sealed(line, protocol, (line.peer_id, self.peer_id)))

        self._inner.serve_lines(protocol, serve)

    async def open_line(self, peer_id: str, protocol: str, *, deadline_s: float) -> Line:
        what = f"line {protocol} to {peer_id} failed"
        if not self._membership.is_member(peer_id):
            raise RequestError(f"{what}: not a member", "refused")
        self._key(what)
        line = await self._inner.open_line(peer_id, protocol, deadline_s=deadline_s)
        return self._sealed(line, protocol, (self.peer_id, peer_id))

    def _sealed(self, line: Line, protocol: str, ends: tuple[str, str]) -> SealedLine:
        def on_fault(sealed: bytes, error: SiloError) -> None:
            self._strangers[error.fault] += 1
            self._check_epoch(line.peer_id, sealed, error)

        return SealedLine(line, self._membership, protocol, ends, on_fault=on_fault)

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        self._topics[topic] = handler
        self._update_topics()

    def unsubscribe(self, topic: str) -> None:
        self._topics.pop(topic, None)
        self._update_topics()

    async def publish(self, topic: str, message: bytes) -> None:
        if len(message) > MAX_RECORD_BYTES:
            raise ValueError(f"a gossip message must be <= {MAX_RECORD_BYTES} bytes, got {len(message)}")
        self._update_topics()
        key = self._membership.keys.current
        name = key.hidden(topic)
        await self._inner.publish(name, key.seal(_GOSSIP, message, name.encode()))

    def _update_topics(self) -> None:
        """Join the topics of all valid keys, and leave those of other keys."""
        wanted = {key.hidden(topic): topic for topic in self._topics for key in self._membership.keys.accepted()}
        for name in self._joined.difference(wanted):
            self._inner.unsubscribe(name)
        for name, topic in wanted.items():
            if name not in self._joined:
                self._inner.subscribe(name, self._gossip_handler(topic, name))
        self._joined = set(wanted)

    def _gossip_handler(self, topic: str, name: str) -> GossipHandler:
        def judge(forwarder: str, sealed: bytes) -> ValidationResult:
            handler = self._topics.get(topic)
            if handler is None or not self._membership.is_member(forwarder):
                self._strangers["stranger"] += 1
                return ValidationResult.IGNORE
            try:
                message = self._membership.keys.key_for(sealed).open(_GOSSIP, sealed, name.encode())
                author = decode_record(message).author
            except SiloError as error:
                self._strangers[error.fault] += 1
                self._check_epoch(forwarder, sealed, error)
                return ValidationResult.IGNORE if error.fault == "unknown_epoch" else ValidationResult.REJECT
            except InvalidRecord:
                return ValidationResult.REJECT
            if not self._membership.is_member(author):  # the forwarder may not know yet that the author was removed
                self._strangers["stranger"] += 1
                return ValidationResult.IGNORE
            return handler(forwarder, message)

        return judge

    def _check_epoch(self, member: str, sealed: bytes, error: SiloError) -> None:
        """Ask a member that seals under a newer key for the roll that brought it."""
        if error.fault == "unknown_epoch" and epoch_of(sealed) > self._membership.keys.epoch:
            self._bulletin.ask_soon(member)

    def _key(self, what: str) -> EpochKey:
        try:
            return self._membership.keys.current
        except SiloError as error:
            raise RequestError(f"{what}: {error}", "refused") from None

    def _refusal(self, fault: str) -> RequestRefused:
        self._strangers[fault] += 1
        return RequestRefused("not a member" if fault == "stranger" else fault)


def admits(membership: Membership, entrances: Collection[str] = ()) -> Admits:
    """Return whom the inner transport answers (`network.transport.Admits`): members, and peers that ask for membership.

    A newcomer without a roll also lets the peers it joins through check whether it is there.
    """

    def admit(peer_id: str, wanted: str) -> bool:
        is_entrance = membership.version == 0 and wanted == "index" and peer_id in entrances
        return wanted == BULLETIN_PROTOCOL or is_entrance or membership.is_member(peer_id)

    return admit


def _request_context(protocol: str, caller: str, answerer: str) -> bytes:
    return f"request/{protocol}/{caller}/{answerer}".encode()


def _response_context(request_context: bytes, sealed_request: bytes) -> bytes:
    """Return what a response is bound to: its request, identified by nonce and tag."""
    return b"response/" + request_context + sealed_request[:16] + sealed_request[-16:]


MakeInner = Callable[[IndexValidator, Admits], Transport | None]
"""(validator of sealed entries, whom to answer) -> the transport beneath, not started; None with the network off."""


def open_membership(
    owner: str, swarm_id: str, identity: Identity, folder: NodeFolder, clock: Callable[[], float] = time.time
) -> Membership:
    """Return the membership that follows from the roll and token on disk. Raises SiloError where this node is no
    member.
    """
    check_folder(folder)
    files = SiloFiles(folder.path)
    seen = SeenRolls(swarm_id, folder.identity)
    membership = Membership(swarm_id, owner, identity, clock=clock, seen=seen)
    if (text := files.read_token()) is not None:
        token = decode_token(text)
        membership.accept_own_grant(token.grant.data, token.wrapped)
    if (data := files.read_roll()) is not None:
        try:
            membership.accept_roll(data)
        except SiloError as error:
            # from before this node was removed and invited again: the invitation is newer than all that was seen
            if error.fault != "old" or membership.keys.epoch < seen.newest.epoch:
                raise
    if membership.keys.epoch < seen.newest.epoch and membership.version == 0:
        raise _no_member(folder, f"an invitation from before epoch {seen.newest.epoch}, which it has seen,")
    if not membership.is_member(identity.peer_id):
        raise _no_member(folder, f"the roll or an invitation without {identity.peer_name}, or past its end")
    return membership


def check_folder(folder: NodeFolder) -> None:
    """Raise SiloError where the folder has neither a roll nor an invitation, before anybody is asked for a passphrase."""
    if not SiloFiles(folder.path).is_membership:
        raise _no_member(folder, "no invitation")


def _no_member(folder: NodeFolder, what: str) -> SiloError:
    return SiloError(
        f"a silo's node must be a member, got {what} in {folder.path}; send its owner what "
        f"`swarm silo request --dir {folder.path}` prints, then `swarm silo join INVITATION --dir {folder.path}`"
    )


def silo_transport(
    config: Config, identity: Identity, folder: NodeFolder, validator: IndexValidator, make_inner: MakeInner
) -> Transport | None:
    """Return a transport for the silo of `config`, over one that `make_inner` makes. Raises SiloError, ConfigError."""
    membership = open_membership(config.swarm.silo_owner, config.swarm_id, identity, folder=folder)
    entrances = [address.rpartition("/p2p/")[2] for address in config.network.initial_peers]
    inner = make_inner(SealedIndex(membership, validator), admits(membership, entrances))
    if inner is None:
        return None
    rng = random.Random(f"silo/{identity.peer_id}")
    bulletin = Bulletin(inner, membership, identity, files=SiloFiles(folder.path), entrances=entrances, rng=rng)
    return SiloTransport(inner, membership, bulletin, validator=validator)


def node_transport(
    config: Config, identity: Identity, folder: NodeFolder, validator: IndexValidator
) -> Transport | None:
    """Return the transport of a node, sealed where its swarm is a silo. Raises SiloError, ConfigError."""

    def make(sealed_validator: IndexValidator, admit: Admits) -> Transport | None:
        return make_transport(config.network, identity, folder.path, validator=sealed_validator, admits=admit)

    if config.swarm.silo_owner and config.network.backend != "off":
        return silo_transport(config, identity, folder, validator=validator, make_inner=make)
    return make_transport(config.network, identity, folder.path, validator=validator)
