"""What a relay's answer to a request for a reservation says of its limits."""

import pytest
from google.protobuf.message import DecodeError

from swarm.network.hivemind.daemon import data_limit

_STATUS_OK = b"\x28\x64"
"""Field 5 = 100."""


@pytest.mark.parametrize(
    ("limit", "granted"),
    [
        (b"", None),
        (b"\x22\x00", None),
        (b"\x22\x02\x08\x78", None),  # a duration only
        (b"\x22\x06\x08\x78\x10\x80\x80\x08", 128 << 10),
        (b"\x22\x09\x08\x88\x0e\x10\x80\x80\x80\x80\x04", 1 << 30),
        (b"\x20\x07", None),  # not the type that it must have
    ],
)
def test_limit_is_read_from_the_answer(limit: bytes, granted: int | None) -> None:
    assert data_limit(b"\x08\x02" + limit + _STATUS_OK) == granted


def test_refusal_and_damage_are_errors() -> None:
    with pytest.raises(ValueError, match="status 200"):
        data_limit(b"\x08\x02\x28\xc8\x01")
    with pytest.raises(ValueError, match="status None"):
        data_limit(b"")
    with pytest.raises(DecodeError):
        data_limit(b"\x22\x09\x08")
