"""Valid bytes for every target: where mutation begins."""

import asyncio
import struct
from datetime import UTC, datetime, timedelta

import msgpack
import zstandard
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarm.manifest import create, dump
from swarm.network.hivemind.index_guard import wrap
from swarm.network.hivemind.parts import DHTProtocol, DictionaryDHTValue
from swarm.network.hivemind.relay_address import address_bytes
from swarm.network.reach.reachability import bytes_request, dial_request, hello_request
from swarm.network.requests.blob_protocol import BlobRequest
from swarm.network.requests.framing import Response, Status, write_acknowledgement, write_request, write_response
from swarm.records.codec import encode_header
from swarm.records.presence import Presence, sign_presence
from swarm.sharing.index import subkey
from tests.fuzz.targets import HEADER_KEY
from tests.unit.experience_factory import ALICE, MALLORY, NOW, SWARM_ID, body_and_header, group, signed

_ADDRESSES = ("/ip4/192.0.2.7/tcp/31000", "/ip6/2001:db8::1/tcp/31000", "/dns4/node.example.org/tcp/443")


def seeds() -> dict[str, list[bytes]]:
    """{target: valid inputs}"""
    made = [body_and_header(group()), body_and_header(group("right", "a", "b"), group(index=1))]
    bodies, headers = [body for body, _ in made], [header for _, header in made]
    records = [signed(header) for header in headers]
    presences = [_presence(_ADDRESSES[:2], True), _presence((), False)]
    subkeys = [subkey(ALICE.peer_id, 3), ALICE.peer_id]
    return {
        "record": records,
        "unsigned_record": records,
        "header": [encode_header(header) for header in headers],
        "presence": presences,
        "body": bodies,
        "packed_body": [zstandard.ZstdDecompressor().decompress(body) for body in bodies],
        "entry": [subkeys[0].encode() + b"\0" + records[0], subkeys[1].encode() + b"\0" + presences[0]],
        "stored_entry": [_stored(HEADER_KEY, subkeys[0], records[0]), _stored(HEADER_KEY, subkeys[1], presences[0])],
        "dictionary": [_dictionary(subkeys[0], records[0]), _dictionary(subkeys[1], b"")],
        "request": [_request(b"hello"), _request(b"")],
        "response": [_response(Status.OK, b"hello"), _response(Status.REFUSED, b"busy")],
        "blob_request": [BlobRequest(b"h" * 32, 1 << 20, 1 << 20).encode(), BlobRequest(b"h" * 32).encode()],
        "reach": [hello_request(), dial_request(31000), bytes_request(1000), struct.pack(">d", NOW) + b"192.0.2.7"],
        "gateway": [msgpack.packb(True) or b"", msgpack.packb({subkeys[0]: records[0]}) or b""],
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
        "manifest": [_manifest()],
        "manifest_content": [_manifest()],
        "answer": [b"1", b"The answer is -3/4 or 1,000.5e3", b"Yes!", b"[[1, 2], [3, 4]]", b"(1 + 2) * 3"],
    }


def _presence(addresses: tuple[str, ...], hosts_index: bool) -> bytes:
    return sign_presence(ALICE, SWARM_ID, Presence(ALICE.peer_id, addresses, addresses, hosts_index, 3, NOW, NOW + 120))


def _stored(key: str, name: str, value: bytes) -> bytes:
    packed = DHTProtocol.serializer.dumps(name)
    return bytes([len(packed)]) + packed + DHTProtocol.serializer.dumps(wrap(key, value))


def _dictionary(name: str, value: bytes) -> bytes:
    entries = DictionaryDHTValue()
    with entries.freeze():
        entries.store(name, DHTProtocol.serializer.dumps(wrap(HEADER_KEY, value)), NOW + 60)
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
