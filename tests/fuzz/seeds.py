"""Valid bytes for every target: where mutation begins."""

import asyncio
import json
import struct
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import base58
import msgpack
import zstandard
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarm.manifest.manifest import create, dump
from swarm.merging.exchange.final_list import FetchAck, MeetReply, MeetRequest
from swarm.merging.exchange.proposal import Accepted, Declined, Fetched, Proposal
from swarm.network.commands.envelope import CommandChannel, encode_opening
from swarm.network.hivemind.daemon_control import address_bytes
from swarm.network.hivemind.index_guard import node_id_of, wrap
from swarm.network.hivemind.parts import DHTID, DHTProtocol, DictionaryDHTValue, dht_pb2, p2pd_pb2
from swarm.network.index_gateway import load_request, store_request
from swarm.network.libp2p.parts import rpc_pb2
from swarm.network.libp2p.pubsub import encode_frame
from swarm.network.reach.reachability import bytes_request, dial_request, hello_request
from swarm.network.requests.blob_protocol import BlobRequest
from swarm.network.requests.framing import Response, Status, write_acknowledgement, write_request, write_response
from swarm.records.adapter_offer import sign_offer
from swarm.records.codec import encode_header
from swarm.records.identity_moves import make_statement
from swarm.records.presence import Presence, sign_presence
from swarm.sharing.index import subkey
from tests.fuzz.dht_targets import CALLER, DHT_KEY, DHT_NOW
from tests.fuzz.gossip_targets import TOPIC
from tests.fuzz.pipeline_targets import pipeline_seeds
from tests.fuzz.record_targets import HEADER_KEY
from tests.fuzz.request_targets import ADAPTER
from tests.fuzz.silo_targets import silo_seeds
from tests.unit.experience_factory import ALICE, MALLORY, NOW, SWARM_ID, body_and_header, group, signed

_messages: Any = dht_pb2
_daemon: Any = p2pd_pb2
_rpc: Any = rpc_pb2
_COMMANDS = CommandChannel(SWARM_ID, "crew", ALICE.peer_id, (MALLORY.peer_id,))
_ADDRESSES = ("/ip4/192.0.2.7/tcp/31000", "/ip6/2001:db8::1/tcp/31000", "/dns4/node.example.org/tcp/443")


@cache
def seeds() -> dict[str, list[bytes]]:
    """{target: valid inputs}. Some need models of a pipeline, so that the first call takes seconds."""
    made = [body_and_header(group()), body_and_header(group("right", "a", "b"), group(index=1))]
    bodies, headers = [body for body, _ in made], [header for _, header in made]
    records = [signed(header) for header in headers]
    presences = [_presence(_ADDRESSES[:2], True), _presence((), False)]
    subkeys = [subkey(ALICE.peer_id, 3), ALICE.peer_id]
    offer = sign_offer(ALICE, SWARM_ID, ADAPTER)
    proposed = sign_offer(MALLORY, SWARM_ID, replace(ADAPTER, peer_id=MALLORY.peer_id, sha256=b"m" * 32))
    return {
        "record": records,
        "unsigned_record": records,
        "header": [encode_header(header) for header in headers],
        "presence": presences,
        "adapter_offer": [offer, sign_offer(ALICE, SWARM_ID, replace(ADAPTER, level=3, precision="int8"))],
        "body": bodies,
        "packed_body": [zstandard.ZstdDecompressor().decompress(body) for body in bodies],
        "entry": [
            subkeys[0].encode() + b"\0" + records[0],
            subkeys[1].encode() + b"\0" + presences[0],
            subkeys[1].encode() + b"\0" + offer,
        ],
        "stored_entry": [_stored(HEADER_KEY, subkeys[0], records[0]), _stored(HEADER_KEY, subkeys[1], presences[0])],
        "dictionary": [
            _entries(HEADER_KEY, subkeys[0], records[0], NOW + 60),
            _entries(HEADER_KEY, subkeys[1], b"", NOW + 60),
        ],
        "request": [_request(b"hello"), _request(b"")],
        "response": [_response(Status.OK, b"hello"), _response(Status.REFUSED, b"busy")],
        "blob_request": [BlobRequest(b"h" * 32, 1 << 20, 1 << 20).encode(), BlobRequest(b"h" * 32).encode()],
        "reach": [hello_request(), dial_request(31000), bytes_request(1000), struct.pack(">d", NOW) + b"192.0.2.7"],
        "gateway": [msgpack.packb(True) or b"", msgpack.packb({subkeys[0]: records[0]}) or b""],
        "gateway_request": [store_request(HEADER_KEY, subkeys[0], records[0], NOW + 60), load_request(HEADER_KEY)],
        "merge_request": [Proposal(proposed).encode(), Fetched(ADAPTER.sha256).encode()],
        "merge_answer": [Accepted(offer).encode(), Declined("busy").encode()],
        "final_request": [MeetRequest(bytes(16), 3, bytes(32), 5).encode(), FetchAck(bytes(16), 1, bytes(32)).encode()],
        "final_answer": [MeetReply(bytes(32), 7).encode(), Declined("wait").encode()],
        "order": [encode_opening(ALICE, _COMMANDS, MALLORY.peer_id, epoch) for epoch in (1, 1_000_000)],
        "certificate": [_certificate()],
        "address": [
            *(address.encode() for address in _ADDRESSES),
            f"{_ADDRESSES[0]}/p2p/{ALICE.peer_id}/p2p-circuit/p2p/{MALLORY.peer_id}".encode(),
            ALICE.peer_id.encode(),
        ],
        "binary_address": [
            *map(address_bytes, _ADDRESSES),
            address_bytes(f"{_ADDRESSES[0]}/p2p/{ALICE.peer_id}/p2p-circuit"),
        ],
        "dht_call": _dht_calls(),
        "dht_reply": _dht_replies(),
        "gossip_frames": [encode_frame(b"one") + encode_frame(b"") + encode_frame(bytes(200))],
        "gossip_stream": [_gossip(records[0])],
        "peers_file": [_peers_file()],
        "rotation": [json.dumps([make_statement(ALICE, MALLORY, NOW)]).encode()],
        "identity_export": _exports(),
        "daemon_answer": _daemon_answers(),
        "manifest": [_manifest()],
        "manifest_content": [_manifest()],
        **silo_seeds(),
        **pipeline_seeds(),
        "answer": [b"1", b"The answer is -3/4 or 1,000.5e3", b"Yes!", b"[[1, 2], [3, 4]]", b"(1 + 2) * 3"],
    }


def _presence(addresses: tuple[str, ...], hosts_index: bool) -> bytes:
    return sign_presence(ALICE, SWARM_ID, Presence(ALICE.peer_id, addresses, addresses, hosts_index, 1, NOW, NOW + 120))


def _stored(key: str, name: str, value: bytes) -> bytes:
    packed = DHTProtocol.serializer.dumps(name)
    return bytes([len(packed)]) + packed + DHTProtocol.serializer.dumps(wrap(key, value))


def _entries(key: str, name: str, value: bytes, expires_at: float) -> bytes:
    """A dictionary of one entry, as replicas hand it over."""
    entries = DictionaryDHTValue()
    with entries.freeze():
        entries.store(name, DHTProtocol.serializer.dumps(wrap(key, value)), expires_at)
    return DHTProtocol.serializer.dumps(entries)


class _Sink:
    """A stream writer that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes | memoryview) -> None:
        self.data += data

    async def drain(self) -> None:
        return None


def _request(request: bytes) -> bytes:
    sink = _Sink()
    write_request(sink, request)  # type: ignore[arg-type]
    return sink.data


def _response(status: Status, body: bytes) -> bytes:
    sink = _Sink()
    asyncio.run(write_response(sink, Response(status, body)))  # type: ignore[arg-type]
    write_acknowledgement(sink)  # type: ignore[arg-type]
    return sink.data


def _certificate() -> bytes:
    """As libp2p's TLS wants it: the extension ends in the peer's signature of the certificate's own key."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    signed_key = b"\x30\x68" + b"\x04\x24" + b"\x00" * 36 + b"\x04\x40" + ALICE.sign(b"libp2p-tls-handshake:" + public)
    oid, name = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1"), x509.Name([])
    start = datetime(2026, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, start, start + timedelta(days=1))
    certificate = builder.add_extension(x509.UnrecognizedExtension(oid, signed_key), critical=False)
    return certificate.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def _manifest() -> bytes:
    tasks = [{"kind": "reasoning_gym", "name": "chain_sum"}]
    return dump(create(ALICE, "friends", 1, NOW, tasks=tasks, description="sums"), ALICE).encode()


def _dht_calls() -> list[bytes]:
    """Each begins with the number of the call."""
    sender = _messages.NodeInfo(node_id=node_id_of(CALLER.to_bytes()))
    key, loads = DHTID.generate(source=DHT_KEY).to_bytes(), DHTProtocol.serializer.dumps
    entry = {"keys": [key], "expiration_time": [DHT_NOW + 60], "in_cache": [False], "peer": sender}
    one = _messages.StoreRequest(subkeys=[loads("a/0")], values=[loads(wrap(DHT_KEY, b"value"))], **entry)
    many = _messages.StoreRequest(subkeys=[b""], values=[_entries(DHT_KEY, "a/1", b"value", DHT_NOW + 60)], **entry)
    return [
        b"\0" + _messages.PingRequest(peer=sender, validate=True).SerializeToString(),
        b"\1" + one.SerializeToString(),
        b"\1" + many.SerializeToString(),
        b"\2" + _messages.FindRequest(keys=[key, bytes(20)], peer=sender).SerializeToString(),
    ]


def _dht_replies() -> list[bytes]:
    sender = _messages.NodeInfo(node_id=node_id_of(CALLER.to_bytes()))
    neighbor = base58.b58decode(ALICE.peer_id)
    neighbors = {"nearest_node_ids": [node_id_of(neighbor)], "nearest_peer_ids": [neighbor]}
    value = _entries(DHT_KEY, "a/0", b"value", DHT_NOW + 60)
    found = _messages.FindResult(
        type=_messages.FOUND_DICTIONARY, value=value, expiration_time=DHT_NOW + 60, **neighbors
    )
    absent = _messages.FindResult(type=_messages.NOT_FOUND, **neighbors)
    return [
        b"\0" + _messages.PingResponse(peer=sender, dht_time=DHT_NOW, available=True).SerializeToString(),
        b"\1" + _messages.StoreResponse(store_ok=[True], peer=sender).SerializeToString(),
        b"\2" + _messages.FindResponse(results=[found], peer=sender).SerializeToString(),
        b"\2" + _messages.FindResponse(results=[absent], peer=sender).SerializeToString(),
    ]


def _gossip(record: bytes) -> bytes:
    control = _rpc.ControlMessage(
        ihave=[_rpc.ControlIHave(topicID=TOPIC, messageIDs=[bytes(16)])],
        iwant=[_rpc.ControlIWant(messageIDs=[bytes(16)])],
        graft=[_rpc.ControlGraft(topicID=TOPIC)],
        prune=[_rpc.ControlPrune(topicID=TOPIC, backoff=5)],
    )
    hello = _rpc.RPC(subscriptions=[_rpc.RPC.SubOpts(subscribe=True, topicid=TOPIC)])
    message = _rpc.RPC(publish=[_rpc.Message(data=record, topicIDs=[TOPIC])], control=control)
    return b"".join(encode_frame(call.SerializeToString()) for call in (hello, message))


def _peers_file() -> bytes:
    peer = {"peer_id": ALICE.peer_id, "addresses": [_ADDRESSES[0]], "last_seen": NOW - 60}
    return json.dumps({"version": 1, "peers": [peer]}).encode()


def _exports() -> list[bytes]:
    head = {"format": "swarm-identity", "version": 1, "peer_id": ALICE.peer_id}
    sealed = {"salt": "00" * 16, "nonce": "00" * 12, "sealed": "00" * 48}
    return [json.dumps(head | {"seed": ALICE.seed.hex()}).encode(), json.dumps(head | sealed).encode()]


def _daemon_answers() -> list[bytes]:
    peer, addresses = base58.b58decode(ALICE.peer_id), list(map(address_bytes, _ADDRESSES))
    found = _daemon.PeerInfo(id=peer, addrs=addresses)
    answers = (
        _daemon.Response(type=_daemon.Response.OK, identify=_daemon.IdentifyResponse(id=peer, addrs=addresses)),
        _daemon.Response(type=_daemon.Response.OK, peers=[found]),
        _daemon.Response(type=_daemon.Response.OK, dht=_daemon.DHTResponse(type=_daemon.DHTResponse.VALUE, peer=found)),
        _daemon.Response(type=_daemon.Response.ERROR, error=_daemon.ErrorResponse(msg="no such peer")),
    )
    message = _daemon.PSMessage(data=b"message", topicIDs=[TOPIC], **{"from": peer})
    subscribed = _daemon.Response(type=_daemon.Response.OK)
    return [
        *(encode_frame(answer.SerializeToString()) for answer in answers),
        encode_frame(subscribed.SerializeToString()) + encode_frame(message.SerializeToString()),
    ]
