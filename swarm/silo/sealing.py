"""The encryption of a silo: messages sealed for all members, and boxes for one of them.

    sealed = epoch (uint32) ‖ nonce (12) ‖ ChaCha20-Poly1305(key of the purpose, nonce, text, bound to purpose and context)
    boxed  = ephemeral X25519 key (32) ‖ ChaCha20-Poly1305(key of both halves, nonce 0, text, bound to context)

Numbers are big-endian. The key of each purpose is derived from the epoch's key by HKDF-SHA256 (RFC 5869), so no two
kinds of message share one. Nonces are random: among 2³² messages of one purpose and epoch two are equal with a
probability of 2⁻³³ (RFC 8439 wants them unique), and a silo with that many messages has rotated its key long before.
The key of a box is used once.
"""

import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from swarm.errors import SiloError
from swarm.limits.bounded_maps import BoundedMap
from swarm.records.identity import Identity

KEY_BYTES = 32
EPOCH_BYTES = 4
MAX_EPOCH = 2**32 - 1
NONCE_BYTES = 12
TAG_BYTES = 16
OVERHEAD_BYTES = EPOCH_BYTES + NONCE_BYTES + TAG_BYTES
"""Bytes that sealing adds to a text."""
BOX_OVERHEAD_BYTES = KEY_BYTES + TAG_BYTES
_DOMAIN = b"swarm/silo/1/"
_MAX_PURPOSES = 64


class EpochKey:
    """The group's key of one epoch. It seals, opens and hides names, and never prints its secret."""

    def __init__(self, secret: bytes, epoch: int) -> None:
        """`secret` holds 32 random bytes. Raises ValueError for another length."""
        if len(secret) != KEY_BYTES:
            raise ValueError(f"a group key must have {KEY_BYTES} bytes, got {len(secret)}")
        self._secret = secret
        self._prefix = epoch.to_bytes(EPOCH_BYTES, "big")
        self._ciphers: BoundedMap[str, ChaCha20Poly1305] = BoundedMap(_MAX_PURPOSES)
        self._names_key = self._derived("names")
        self.epoch = epoch

    def seal(self, purpose: str, text: bytes, context: bytes) -> bytes:
        """Seal a text, which grows by OVERHEAD_BYTES. It opens only for the same purpose and context."""
        nonce = os.urandom(NONCE_BYTES)
        return self._prefix + nonce + self._cipher(purpose).encrypt(nonce, text, self._prefix + context)

    def open(self, purpose: str, sealed: bytes, context: bytes) -> bytes:
        """Open a text. Raises SiloError unless a member sealed it in this epoch, for this purpose and context."""
        if epoch_of(sealed) != self.epoch:
            raise SiloError(f"a message must be of epoch {self.epoch}, got {epoch_of(sealed)}", "unknown_epoch")
        whole = memoryview(sealed)  # a body has half a megabyte and is not copied
        nonce, rest = whole[EPOCH_BYTES : EPOCH_BYTES + NONCE_BYTES], whole[EPOCH_BYTES + NONCE_BYTES :]
        try:
            return self._cipher(purpose).decrypt(nonce, rest, self._prefix + context)
        except InvalidTag:
            raise SiloError("a message must be sealed by a member, got one that does not open", "forged") from None

    def hidden(self, name: str) -> str:
        """Return 64 hex digits that stand for `name` to members and mean nothing to others."""
        return hmac.digest(self._names_key, name.encode(), "sha256").hex()

    def has_same_secret(self, other: "EpochKey") -> bool:
        """Return whether both hold the same secret, whatever their epochs are."""
        return hmac.compare_digest(self._secret, other._secret)

    def _cipher(self, purpose: str) -> ChaCha20Poly1305:
        return self._ciphers.get_or_add(purpose, lambda: ChaCha20Poly1305(self._derived(purpose)))

    def _derived(self, purpose: str) -> bytes:
        return _hkdf(self._secret, self._prefix + purpose.encode())

    def boxed_for(self, public_key: bytes, context: bytes) -> bytes:
        """Return this key in a box that only the owner of an X25519 key can open."""
        return box(public_key, self._secret, self._prefix + context)

    def __repr__(self) -> str:
        return f"EpochKey({self.epoch})"


def open_epoch_key(private_key: X25519PrivateKey, epoch: int, boxed: bytes, context: bytes) -> EpochKey:
    """Open what `EpochKey.boxed_for` made. Raises SiloError."""
    secret = open_box(private_key, boxed, epoch.to_bytes(EPOCH_BYTES, "big") + context)
    if len(secret) != KEY_BYTES:
        raise SiloError(f"a group key must have {KEY_BYTES} bytes, got {len(secret)}", "malformed")
    return EpochKey(secret, epoch)


def epoch_of(sealed: bytes) -> int:
    """Return the epoch that a message names. Raises SiloError where the message is too short."""
    if len(sealed) < OVERHEAD_BYTES:
        raise SiloError(f"a sealed message must have >= {OVERHEAD_BYTES} bytes, got {len(sealed)}", "malformed")
    return int.from_bytes(sealed[:EPOCH_BYTES], "big")


def box_key(identity: Identity) -> X25519PrivateKey:
    """Return the X25519 key of an identity. It is derived from the seed, so nothing else has to be stored."""
    return X25519PrivateKey.from_private_bytes(_hkdf(identity.seed, b"box key"))


def box(public_key: bytes, text: bytes, context: bytes) -> bytes:
    """Box a text, which grows by BOX_OVERHEAD_BYTES. Raises SiloError for an invalid key."""
    ephemeral = X25519PrivateKey.generate()
    own_half = ephemeral.public_key().public_bytes_raw()
    return own_half + _box_cipher(ephemeral, public_key, own_half + public_key).encrypt(
        bytes(NONCE_BYTES), text, context
    )


def open_box(private_key: X25519PrivateKey, boxed: bytes, context: bytes) -> bytes:
    """Open a box. Raises SiloError for anything but a box for this key and context."""
    if len(boxed) < BOX_OVERHEAD_BYTES:
        raise SiloError(f"a box must have >= {BOX_OVERHEAD_BYTES} bytes, got {len(boxed)}", "malformed")
    their_half, sealed = boxed[:KEY_BYTES], boxed[KEY_BYTES:]
    both = their_half + private_key.public_key().public_bytes_raw()
    try:
        return _box_cipher(private_key, their_half, both).decrypt(bytes(NONCE_BYTES), sealed, context)
    except InvalidTag:
        raise SiloError("a box must be for this key, got one that does not open", "forged") from None


def _box_cipher(private_key: X25519PrivateKey, public_key: bytes, both_halves: bytes) -> ChaCha20Poly1305:
    try:
        shared = private_key.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError:  # wrong length or small order: everybody could know the outcome
        raise SiloError("a box key must be an X25519 key, got another", "malformed") from None
    return ChaCha20Poly1305(_hkdf(shared, b"box" + both_halves))


def _hkdf(secret: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=_DOMAIN + info).derive(secret)
