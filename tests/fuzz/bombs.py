"""Small inputs that ask for much: of time, of memory, of stack. As large as each target's own bounds let them come."""

import struct
from collections.abc import Callable

import msgpack
import zstandard

from swarm.manifest.manifest import MAX_BYTES as MANIFEST_BYTES
from swarm.merging.exchange.final_list import MAX_MESSAGE_BYTES as FINAL_MESSAGE_BYTES
from swarm.merging.exchange.proposal import MAX_MESSAGE_BYTES
from swarm.network.index_gateway import MAX_INDEX_RESPONSE_BYTES
from swarm.network.libp2p.parts import rpc_pb2
from swarm.network.libp2p.pubsub import MAX_CALL_BYTES, encode_frame
from swarm.network.peers.dialling import MAX_FILE_BYTES as PEERS_BYTES
from swarm.pipeline.tensor_bundle import MAX_HEAD_BYTES
from swarm.records.codec import MAX_RECORD_BYTES, MAX_UNPACKED_BODY_BYTES
from swarm.silo.grant import MAX_GRANT_BYTES, MAX_TOKEN_BYTES
from swarm.silo.roll import MAX_ROLL_BYTES

_LARGEST_REPLY_BYTES = 4 << 20
"""What the daemon passes on of a unary call."""


def bombs() -> dict[str, list[bytes]]:
    """{target: inputs}"""
    return {
        **dict.fromkeys(
            ("record", "unsigned_record", "header", "presence", "adapter_offer"), _packed_bombs(MAX_RECORD_BYTES)
        ),
        **dict.fromkeys(("merge_request", "merge_answer"), _packed_bombs(MAX_MESSAGE_BYTES)),
        **dict.fromkeys(("final_request", "final_answer"), _packed_bombs(FINAL_MESSAGE_BYTES)),
        **dict.fromkeys(("silo_roll_content", "silo_roll", "silo_bulletin"), _packed_bombs(MAX_ROLL_BYTES)),
        **dict.fromkeys(("silo_grant", "silo_request", "silo_question"), _packed_bombs(MAX_GRANT_BYTES)),
        "stage_bundle": [head + bytes(64) for head in _heads()],
        "stage_order": [bytes([1]) + head for head in _heads()],
        "stage_answer": [bytes([0]) + head for head in _heads()],
        "silo_invitation_content": [
            *_packed_bombs(MAX_TOKEN_BYTES),
            *(msgpack.packb([1, b"", bytes(80), frame]) or b"" for frame in _lying_frames()),
        ],
        "body": [_compressed(bomb) for bomb in _packed_bombs(MAX_UNPACKED_BODY_BYTES - 64)] + _lying_frames(),
        "packed_body": _packed_bombs(MAX_UNPACKED_BODY_BYTES - 64),
        "entry": [b"a/0\0" + bomb for bomb in _packed_bombs(MAX_RECORD_BYTES)],
        "gateway": _packed_bombs(MAX_INDEX_RESPONSE_BYTES),
        "gateway_request": _packed_bombs(1024),
        "dictionary": _dictionaries(),
        "dht_reply": [b"\2" + _found(value) for value in (*_dictionaries(), *_packed_bombs(_LARGEST_REPLY_BYTES))],
        "request": [b"\xff\xff\xff\xff" + bytes(1000)],
        "response": [b"\0" + b"\xff" * 8 + bytes(1000)],
        "gossip_frames": [b"\xff\xff\xff\xff\xff", b"\x80" * 10_000, b"\0" * 16_384],
        "gossip_stream": _calls(),
        "manifest": _manifests(),
        "peers_file": [b"[" * PEERS_BYTES, b'{"peers":[' + b"[]," * (PEERS_BYTES // 3 - 10) + b"[]]}"],
        "rotation": [b"[" * 100_000, b"[" + b"[]," * 300_000 + b"[]]", b"9" * 100_000],
        "identity_export": [b"[" * 4096, b"9" * 4096, b'{"a":' * 800],
        "answer": [b"1," * 2000, b"9" * 4096, b"1e999999999", b"(" * 4096, b"1/" * 2000, b" " * 4095 + b"x"],
        "address": [b"/ip4/" + b"1" * 100_000, b"1" * 100_000, b"/dns4/" + b"a." * 126 + b"a/tcp/1"],
        "binary_address": [b"\x35\xff\xff\xff\xff\x0f" + bytes(4000), b"\xa5\x03\x02\0\0\xa2\x02" * 500],
        "certificate": [b"\x30\x84\xff\xff\xff\xff" + bytes(1000), b"\x30\x80" * 2000],
    }


def _packed_bombs(num_bytes: int) -> list[bytes]:
    """msgpack of about `num_bytes`: nests, crowds, and announcements of what does not follow."""
    announced = (num_bytes // 2).to_bytes(4, "big")
    crowds = (b"\xc0", b"\x90", b"\x80", b"\xa1a", b"\xc4\x01a", b"\xd4\x01a", b"\x91\x90")
    return [
        b"\x91" * num_bytes,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        (b"\xdd" + announced) * min(num_bytes // 5, 1000),
        (b"\xdc\x00\x10" * min(num_bytes // 3, 500))[:num_bytes],
        *(_crowd(item, num_bytes) for item in crowds),
    ]


def _crowd(item: bytes, num_bytes: int) -> bytes:
    count = (num_bytes - 5) // len(item)
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def _compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(data)


def _lying_frames() -> list[bytes]:
    """A frame of 256 MiB of zeros, and one that does not state how long it is."""
    without_size = zstandard.ZstdCompressor(write_content_size=False)
    compressor = zstandard.ZstdCompressor().compressobj(size=256 << 20)
    bomb = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(256)) + compressor.flush()
    return [bomb, without_size.compress(bytes(16 << 20))]


def _dictionaries() -> list[bytes]:
    """hivemind's dictionaries of crowds."""
    crowds = (_crowd(item, _LARGEST_REPLY_BYTES - 100) for item in (b"\x90", b"\x93\xa1a\xc4\x00\xc0"))
    return [msgpack.packb(msgpack.ExtType(0x50, b"\x93\xc0\xc0" + crowd)) or b"" for crowd in crowds]


def _found(value: bytes) -> bytes:
    """The reply to a search that found `value`, in protobuf: {results: {type: 2, value}}."""
    result = b"\x08\x02\x12" + encode_frame(value)
    return b"\x0a" + encode_frame(result)


def _calls() -> list[bytes]:
    """GossipSub's calls as full as they may be."""

    def full(item: Callable[[int], rpc_pb2.RPC]) -> bytes:
        items = b"".join(item(number).SerializeToString() for number in range(4000))
        return encode_frame(items[:MAX_CALL_BYTES])

    rpc = rpc_pb2
    return [
        full(lambda n: rpc.RPC(subscriptions=[rpc.RPC.SubOpts(subscribe=True, topicid=str(n))])),
        full(lambda n: rpc.RPC(publish=[rpc.Message(data=b"%d" % n, topicIDs=["topic"])])),
        full(lambda n: rpc.RPC(control=rpc.ControlMessage(graft=[rpc.ControlGraft(topicID=str(n))]))),
        full(lambda n: rpc.RPC(control=rpc.ControlMessage(iwant=[rpc.ControlIWant(messageIDs=[b"%d" % n])]))),
        full(lambda n: rpc.RPC(control=rpc.ControlMessage(prune=[rpc.ControlPrune(topicID="topic", backoff=n)]))),
    ]


def _manifests() -> list[bytes]:
    line = b"a." * 2000 + b"a = 1\n"
    return [
        b"a = " + b"[" * 4000,
        b"a = " + b"{a=" * 1000,
        (b"[" + b"a." * 2000 + b"a]\n") * (MANIFEST_BYTES // 4010),
        line.replace(b"a", b"b") * (MANIFEST_BYTES // len(line)),
        b"".join(b"k%d = 1\n" % number for number in range(MANIFEST_BYTES // 12)),
        b"".join(b"[[tasks]]\n" for _ in range(MANIFEST_BYTES // 10)),
        b"a = " + b"9" * 4000,
        b"a" * (MANIFEST_BYTES + 1),
    ]


def _heads() -> list[bytes]:
    """Of bundles, as long as they may be."""
    most = MAX_HEAD_BYTES - 16
    nested = [msgpack.packb([{"a": [[]] * (most - 64)}, []]), msgpack.packb([{}, [["x", "f4", [2**32 - 1] * 4]] * 9])]
    heads = [*(head or b"" for head in nested), b"\x92\x80\xdd" + struct.pack(">I", 2**32 - 1), b"\x91" * most]
    return [struct.pack(">I", len(head)) + head for head in heads]
