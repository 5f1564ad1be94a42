"""Decoders of what a silo's members, owner and strangers send, as functions of bytes.

The `…_content` ones are what somebody makes who has the key to sign or to seal it.
"""

import base64

from swarm.errors import SiloError
from swarm.records.identity import is_peer_id
from swarm.records.signing import pack
from swarm.silo import grant as grants
from swarm.silo import roll as rolls
from swarm.silo.bulletin import decode_bulletin, decode_question, encode_bulletin, encode_question
from swarm.silo.grant import INVITE_PREFIX, REQUEST_PREFIX, decode_grant, decode_token, read_request
from swarm.silo.roll import MAX_MEMBERS, decode_roll, encode_roll, unpacked
from swarm.silo.sealing import EpochKey, box, box_key, open_box
from swarm.silo.silo_transport import SealedIndex
from tests.unit.silo_factory import OWNER, SILO_ID, found, identity_of, invite, make_request, membership_of

ANN = identity_of(0)
KEY = EpochKey(b"k" * 32, 1)
NAME, SUBKEY = KEY.hidden("key"), f"{ANN.peer_id}/1"
_MEMBERSHIP = membership_of(ANN, found(ANN).data)
_INDEX = SealedIndex(_MEMBERSHIP)
_PLACE = _INDEX.sealed("key", SUBKEY, b"")[0]


def silo_roll(data: bytes) -> bool:
    try:
        roll = decode_roll(data, OWNER.peer_id, SILO_ID)
    except SiloError as error:
        return _told(error)
    assert len(roll.members) <= MAX_MEMBERS and all(is_peer_id(one.peer_id) for one in roll.members)
    assert decode_roll(encode_roll(roll, OWNER), OWNER.peer_id, SILO_ID) == roll
    return True


def silo_roll_content(data: bytes) -> bool:
    """By an owner who means harm; members take it or leave it."""
    signed = pack([data, OWNER.sign(rolls._DOMAIN + data)])
    try:
        membership_of(ANN, signed)
    except SiloError as error:
        return _told(error)
    return silo_roll(signed)


def silo_grant(data: bytes) -> bool:
    """The payload, signed by the owner."""
    signed = pack([data, OWNER.sign(grants._GRANT_DOMAIN + data)])
    try:
        assert is_peer_id(decode_grant(signed, OWNER.peer_id, SILO_ID).peer_id)
    except SiloError as error:
        return _told(error)
    return True


def silo_invitation(data: bytes) -> bool:
    """As pasted."""
    return _invitation(data.decode("latin-1"))


def silo_invitation_content(data: bytes) -> bool:
    return _invitation(INVITE_PREFIX + base64.urlsafe_b64encode(data).decode())


def silo_request(data: bytes) -> bool:
    """The payload, signed by the one that honest ones name."""
    signed = pack([data, ANN.sign(grants._REQUEST_DOMAIN + data)])
    text = REQUEST_PREFIX + base64.urlsafe_b64encode(signed).decode()
    try:
        assert read_request(text).peer_id == ANN.peer_id
    except SiloError as error:
        return _told(error)
    return True


def silo_question(data: bytes) -> bool:
    try:
        version, grant = decode_question(data)
    except SiloError as error:
        return _told(error)
    assert decode_question(encode_question(version, grant)) == (version, grant)
    return True


def silo_bulletin(data: bytes) -> bool:
    try:
        roll, told = decode_bulletin(data)
    except SiloError as error:
        return _told(error)
    assert decode_bulletin(encode_bulletin(roll, told)) == (roll, told)
    return True


def silo_box(data: bytes) -> bool:
    try:
        open_box(box_key(ANN), data, b"")
    except SiloError as error:
        return _told(error)
    return True


def silo_sealed(data: bytes) -> bool:
    try:
        KEY.open("gossip", data, b"")
    except SiloError as error:
        return _told(error)
    return True


def silo_entry(data: bytes) -> bool:
    """What is inside an entry that a member has sealed."""
    sealed = _MEMBERSHIP.keys.current.seal("index", data, f"{_PLACE}/{SUBKEY}".encode())
    opened = _INDEX.opened(_PLACE, SUBKEY, sealed)
    assert opened is None or opened[0] == "key"
    return opened is not None


def silo_seeds() -> dict[str, list[bytes]]:
    """{target: valid inputs}"""
    owner = found(ANN, identity_of(1))
    token = invite(owner, identity_of(2))
    packed = base64.urlsafe_b64decode(token.removeprefix(INVITE_PREFIX) + "==")
    asked = make_request(ANN).removeprefix(REQUEST_PREFIX)
    payloads = {
        "silo_roll_content": owner.data,
        "silo_grant": unpacked(packed, 4)[1],
        "silo_request": base64.urlsafe_b64decode(asked + "=="),
    }
    return {
        "silo_roll": [owner.data, found().data],
        **{name: [unpacked(signed, 2)[0]] for name, signed in payloads.items()},
        "silo_invitation": [token.encode()],
        "silo_invitation_content": [packed],
        "silo_question": [encode_question(3, b"grant"), encode_question(0, b"")],
        "silo_bulletin": [encode_bulletin(owner.data, [b"one", b"two"]), encode_bulletin(b"", [])],
        "silo_box": [box(box_key(ANN).public_key().public_bytes_raw(), b"text", b"")],
        "silo_sealed": [KEY.seal("gossip", b"text", b""), KEY.seal("gossip", bytes(1024), b"")],
        "silo_entry": [b"key\0value", b"key\0"],
    }


def _invitation(text: str) -> bool:
    try:
        token = decode_token(text)
    except SiloError as error:
        return _told(error)
    assert token.manifest.silo and token.grant.swarm_id == token.manifest.id
    return True


def _told(error: SiloError) -> bool:
    assert "\n" not in str(error) and len(str(error)) < 1000
    assert error.fault in ("malformed", "forged", "old", "unknown_epoch", "stranger")
    return False
