"""A stranger's gossip stream ends where it costs more than honest peers do."""

import pytest

from swarm.network.libp2p.parts import rpc_pb2, trio
from swarm.network.libp2p.pubsub import encode_frame
from tests.fuzz.gossip_targets import SENDER, TOPIC, converse

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
MESSAGE = encode_frame(rpc_pb2.RPC(publish=[rpc_pb2.Message(data=b"message", topicIDs=[TOPIC])]).SerializeToString())
AGAIN = encode_frame(rpc_pb2.RPC(publish=[rpc_pb2.Message(data=b"again", topicIDs=[TOPIC])]).SerializeToString())
EMPTY = encode_frame(b"")


def test_message_between_a_few_empty_calls_is_heard() -> None:
    accepted, guard = trio.run(converse, EMPTY * 50 + MESSAGE)
    assert accepted == [b"message"]
    assert not guard.is_banned(str(SENDER))


@pytest.mark.parametrize(
    "flood",
    [
        AGAIN * 2000,
        EMPTY * 2000,
        encode_frame(b"\xf8\x7f\x01") * 2000,  # nothing but a field that nobody knows
        encode_frame(rpc_pb2.RPC(publish=[rpc_pb2.Message(data=b"message")]).SerializeToString()) * 30,
    ],
)
def test_flood_of_calls_with_nothing_new_in_them_ends_before_the_message_after_it(flood: bytes) -> None:
    accepted, guard = trio.run(converse, flood + MESSAGE)
    assert b"message" not in accepted
    assert guard.is_banned(str(SENDER))


def test_bytes_that_are_no_call_end_the_stream() -> None:
    accepted, guard = trio.run(converse, encode_frame(b"\xff") + MESSAGE)
    assert accepted == []
    assert not guard.is_banned(str(SENDER))
