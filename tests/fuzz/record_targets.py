"""Decoders of records, manifests and answers, as functions of bytes. `targets` says what such a function is."""

import math
import tomllib
from dataclasses import replace

import tomli_w
import zstandard

from swarm.errors import ManifestError
from swarm.extensions.points import VERIFIERS
from swarm.manifest import manifest as manifests
from swarm.records.adapter_offer import sign_offer, verify_offer
from swarm.records.codec import decode_body, decode_header, encode_body, encode_header
from swarm.records.presence import verify_presence
from swarm.records.rejection import InvalidRecord
from swarm.records.signing import verified_by
from swarm.sharing.index import EntryValidator, Shard, adapter_key, experience_key, presence_key
from swarm.tasks.reasoning_gym_source import ALPHABETS, admissible
from tests.unit.experience_factory import ALICE, LINEAGE, NOW, SWARM_ID, admission, group, header_of

SHARD = Shard(0, 0)
HEADER_KEY, PRESENCE_KEY = experience_key(SWARM_ID, SHARD, NOW), presence_key(SWARM_ID, SHARD)
MERGE_KEY = adapter_key(SWARM_ID, "merge", LINEAGE.policy, SHARD)
_EXPECTED = {"exact": "1", "numeric": "-3/4", "regex": r"(?i)\s*yes[!.]*"}


def record(data: bytes) -> bool:
    """A header as it is gossiped, signatures checked."""
    try:
        admission().admit_header(data)
    except InvalidRecord:
        return False
    return True


def unsigned_record(data: bytes) -> bool:
    """The same for an attacker who signs whatever he likes."""
    with verified_by(lambda peer_id, signed, signature: True):
        return record(data)


def header(data: bytes) -> bool:
    try:
        decoded = decode_header(data, ALICE.peer_id)
    except InvalidRecord:
        return False
    assert decoded.groups
    assert math.isfinite(decoded.created_at) and math.isfinite(decoded.expires_at)
    assert decode_header(encode_header(decoded), ALICE.peer_id) == decoded
    return True


def presence(data: bytes) -> bool:
    with verified_by(lambda peer_id, signed, signature: True):
        try:
            decoded = verify_presence(data, SWARM_ID)
        except InvalidRecord:
            return False
    assert all(isinstance(address, str) for address in decoded.addresses + decoded.gossip_addresses)
    return True


def adapter_offer(data: bytes) -> bool:
    with verified_by(lambda peer_id, signed, signature: True):
        try:
            decoded = verify_offer(data, SWARM_ID)
        except InvalidRecord:
            return False
        assert math.isfinite(decoded.created_at) and math.isfinite(decoded.expires_at)
        assert decoded.num_bytes > 0 and len(decoded.sha256) == 32
        own = replace(decoded, peer_id=ALICE.peer_id)
        assert verify_offer(sign_offer(ALICE, SWARM_ID, own), SWARM_ID) == own
    return True


def body(data: bytes) -> bool:
    """A body that its author announced correctly, through all of admission."""
    announced = header_of([group()], data)
    try:
        groups = decode_body(data, ALICE.peer_id, LINEAGE, 7)
        announced = header_of(list(groups), data)
    except InvalidRecord:
        groups = ()
    try:
        admitted = admission().admit_body(announced, data)
    except InvalidRecord:
        return False
    assert len(admitted) == len(groups)
    if all(-6e4 <= value <= 0.0 for one in groups for rollout in one.rollouts for value in rollout.logprobs):
        assert decode_body(encode_body(groups), ALICE.peer_id, LINEAGE, 7) == groups  # others are cut to these bounds
    assert all(math.isfinite(value) for one in admitted for rollout in one.rollouts for value in rollout.logprobs)
    return True


def packed_body(data: bytes) -> bool:
    """The same, the fuzzer's bytes being what is inside the compression."""
    return body(zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data))


def entry(data: bytes) -> bool:
    """An entry of the index as a replica stores or returns it: `subkey NUL value`, under each kind of key."""
    name, _, value = data.partition(b"\0")
    text, is_valid = name.decode(errors="replace"), EntryValidator(SWARM_ID)
    believed = [
        is_valid(key, text, value) for key in (HEADER_KEY, PRESENCE_KEY, MERGE_KEY, text)
    ]  # all of them, whatever the first says
    return any(believed)


def manifest(data: bytes) -> bool:
    try:
        parsed = manifests.parse(data)
    except ManifestError as error:
        assert str(error).isprintable()
        return False
    assert manifests.parse(manifests.dump(parsed, ALICE).encode()) == parsed
    return True


def manifest_content(data: bytes) -> bool:
    """The same for a founder who signs whatever he likes."""
    try:
        content = {**tomllib.loads(data.decode()), "founder": ALICE.peer_id}
        content.pop("signature", None)
        signature = ALICE.sign(manifests._signed_bytes(content)).hex()
        data = tomli_w.dumps({**content, "signature": signature}).encode()
    except (ValueError, TypeError, RecursionError, ManifestError):
        return False
    return manifest(data)


def answer(data: bytes) -> bool:
    """An answer's text, to the verifiers of this project and the guard in front of the others."""
    text = data.decode(errors="replace")
    rewards = [VERIFIERS.load(name).score(_EXPECTED[name], text) for name in _EXPECTED]
    assert all(reward in (0.0, 1.0) for reward in rewards)
    return any(admissible(data_set, text) for data_set in ALPHABETS)
