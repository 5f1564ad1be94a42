"""How a node becomes a member: its request and the owner's answer, each a line of text.

    newcomer   request = msgpack [payload, own signature]     payload = msgpack [1, peer id, X25519 key (32)]
    owner      grant   = msgpack [payload, owner's signature] payload = msgpack [1, swarm id (16), peer id, X25519 key,
                                                                                until, epoch]
               token   = msgpack [1, grant, wrapped key (80), zstd of the manifest]

A grant proves membership for as long as its epoch lasts: members that do not have the roll with the newcomer yet accept
the grant instead. Neither text is a secret: only the newcomer can open the key in its token.
"""

import base64
import binascii
import re
from dataclasses import dataclass, field

import zstandard

from swarm.errors import ManifestError, SiloError
from swarm.manifest.manifest import MAX_BYTES as MAX_MANIFEST_BYTES
from swarm.manifest.manifest import Manifest, parse
from swarm.records.identity import Identity, is_peer_id
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import check_array, check_bytes, check_float, check_int, check_text, pack
from swarm.silo.roll import (
    FORMAT,
    MAX_TIME_S,
    WRAPPED_BYTES,
    check_signed,
    fields_of,
    one_error,
    open_envelope,
    sign,
    unpacked,
)
from swarm.silo.sealing import KEY_BYTES, MAX_EPOCH, box_key

MAX_GRANT_BYTES = 512
MAX_TOKEN_BYTES = 96 << 10
REQUEST_PREFIX = "swarm-silo-request-"
INVITE_PREFIX = "swarm-silo-invite-"
_REQUEST_DOMAIN = b"swarm/silo-request/1\x00"
_GRANT_DOMAIN = b"swarm/silo-grant/1\x00"


@dataclass(frozen=True, slots=True)
class MembershipRequest:
    """A request for membership, with the key for which the group's key is to be boxed."""

    peer_id: str
    box_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Grant:
    """A membership signed by the owner."""

    swarm_id: str
    peer_id: str
    box_key: bytes = field(repr=False)
    until: float
    """Seconds since the epoch."""
    epoch: int
    """Epoch of the group's key at that time."""
    data: bytes = field(repr=False)
    """The grant as it was signed."""


@dataclass(frozen=True, slots=True)
class Token:
    """Everything that a newcomer needs."""

    grant: Grant
    wrapped: bytes = field(repr=False)
    """The key of the grant's epoch, boxed for the newcomer."""
    manifest: Manifest
    manifest_text: str = field(repr=False)


def make_request(identity: Identity) -> str:
    """Return one line for the owner of any silo. It contains no secret."""
    fields = [identity.peer_id, box_key(identity).public_key().public_bytes_raw()]
    return _text(REQUEST_PREFIX, sign(identity, _REQUEST_DOMAIN, fields))


@one_error("a request to become a member")
def read_request(text: str) -> MembershipRequest:
    """Raises SiloError unless the peer that it names has signed it."""
    payload, signature = open_envelope(_bytes(REQUEST_PREFIX, text), MAX_GRANT_BYTES)
    peer_id, key = fields_of(payload, 2, 3)
    check_signed(_peer_id(peer_id), _REQUEST_DOMAIN, payload, signature=signature)
    return MembershipRequest(peer_id, check_bytes(key, KEY_BYTES))


def encode_grant(owner: Identity, swarm_id: str, request: MembershipRequest, until: float, epoch: int) -> bytes:
    fields = [bytes.fromhex(swarm_id), request.peer_id, request.box_key, float(until), epoch]
    return sign(owner, _GRANT_DOMAIN, fields)


@one_error("a silo's grant")
def decode_grant(data: bytes, owner: str, swarm_id: str) -> Grant:
    """Raises SiloError unless the owner signed it for this swarm. It may have expired."""
    payload, signature = open_envelope(data, MAX_GRANT_BYTES)
    check_signed(owner, _GRANT_DOMAIN, payload, signature=signature)
    named_swarm, peer_id, key, until, epoch = fields_of(payload, 5, 6)
    if check_bytes(named_swarm, 16).hex() != swarm_id:
        raise InvalidRecord(Rejection.FOREIGN_SWARM)
    return Grant(
        swarm_id=swarm_id,
        peer_id=_peer_id(peer_id),
        box_key=check_bytes(key, KEY_BYTES),
        until=check_float(until, 0.0, MAX_TIME_S),
        epoch=check_int(epoch, 1, MAX_EPOCH),
        data=data,
    )


def encode_token(grant: bytes, wrapped: bytes, manifest_text: str) -> str:
    manifest = zstandard.ZstdCompressor(level=19).compress(manifest_text.encode())
    return _text(INVITE_PREFIX, pack([FORMAT, grant, wrapped, manifest]))


@one_error("a silo's token")
def decode_token(text: str) -> Token:
    """Raises SiloError unless the founder of the manifest in it signed both the manifest and the grant."""
    data = _bytes(INVITE_PREFIX, text)
    version, grant, wrapped, packed = check_array(unpacked(data, 4), 4)
    check_int(version, FORMAT, FORMAT)
    manifest_data = _unzipped(check_bytes(packed))
    try:
        manifest = parse(manifest_data)
    except ManifestError as error:
        raise SiloError(f"the manifest in it does not hold: {error}", "malformed") from None
    if manifest.silo is None:
        raise SiloError(f"its manifest must be of a silo, got the public swarm {manifest.name}", "malformed")
    return Token(
        grant=decode_grant(check_bytes(grant), manifest.founder, manifest.id),
        wrapped=check_bytes(wrapped, WRAPPED_BYTES),
        manifest=manifest,
        manifest_text=manifest_data.decode(),
    )


def _unzipped(packed: bytes) -> bytes:
    try:
        # zstandard would allocate whatever the frame claims
        if zstandard.frame_content_size(packed) not in range(MAX_MANIFEST_BYTES + 1):
            raise SiloError(f"its manifest must have <= {MAX_MANIFEST_BYTES} bytes and say so", "malformed")
        return zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError:
        raise SiloError("its manifest must be zstd, got something else", "malformed") from None


def _peer_id(value: object) -> str:
    peer_id = check_text(value, 64)
    if not is_peer_id(peer_id):
        raise InvalidRecord(Rejection.MALFORMED, "expected a peer id")
    return peer_id


def _text(prefix: str, data: bytes) -> str:
    return prefix + base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(prefix: str, text: str) -> bytes:
    """Decode a line. White space, which mail and terminals insert, is ignored."""
    if len(text) > 2 * MAX_TOKEN_BYTES:
        raise SiloError(f"it must have <= {2 * MAX_TOKEN_BYTES} characters, got {len(text)}", "malformed")
    compact = re.sub(r"\s", "", text)
    if not compact.startswith(prefix):
        raise SiloError(f"it must begin with {prefix}, got {compact[:24]!a}; paste the whole line", "malformed")
    body = compact.removeprefix(prefix)
    try:
        return base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise SiloError("it must be base64, got other characters; paste the whole line", "malformed") from None
