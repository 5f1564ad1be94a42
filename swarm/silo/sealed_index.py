"""Entries of the index as members store them: under names that mean nothing to others, with their key sealed inside.

    key    → hidden name (64 hex digits)            value → seal(key NUL value), bound to hidden name and subkey

A keyed hash does not lead back to its key, and whoever hosts the index has to know the key to judge an entry: so it comes
with the value. Subkeys stay as they are: they begin with the author's peer id, which any connection tells anyway, and the
index bounds by them what one author may hold.
"""

from collections import Counter

from swarm.errors import SiloError
from swarm.network.index_entry import UNSIGNED, IndexValidator, Validity
from swarm.silo.membership import Membership

_PURPOSE = "index"
_KEY_END = b"\0"


class SealedIndex:
    """Of one node. As a function, the validator of the transport beneath: may this sealed entry be stored or believed."""

    def __init__(
        self, membership: Membership, validator: IndexValidator | None = None, refused: Counter[str] | None = None
    ) -> None:
        """`validator`: of the plain entry. `refused` is told why entries did not open."""
        self._membership = membership
        self._validator = validator
        self._refused: Counter[str] = Counter() if refused is None else refused

    def sealed(self, key: str, subkey: str, value: bytes) -> tuple[str, bytes]:
        """(hidden name, sealed value). Raises SiloError where this node has no key."""
        epoch_key = self._membership.keys.current
        name = epoch_key.hidden(key)
        return name, epoch_key.seal(_PURPOSE, key.encode() + _KEY_END + value, _context(name, subkey))

    def opened(self, name: str, subkey: str, sealed: bytes) -> tuple[str, bytes] | None:
        """(key, value); None for what no member of this moment has sealed for this place."""
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
        """The validity of the plain entry: every host is a member, so it can open what it stores."""
        opened = self.opened(name, subkey, sealed)
        if opened is None:
            return None
        return UNSIGNED if self._validator is None else self._validator(opened[0], subkey, opened[1])


def _context(name: str, subkey: str) -> bytes:
    return f"{name}/{subkey}".encode()
