"""Checks whether a peer listens at an address, by a new connection and the peer's own signature.

    TCP connect → multistream: /tls/1.0.0 → TLS 1.3 handshake → the certificate carries the peer's signature

In libp2p's TLS (specs/tls/tls.md of libp2p) the certificate is self-signed with a temporary key, and an extension holds
the peer's public key with a signature over that temporary key. Another listener cannot show such a certificate of this
peer. Only the name of the protocol is ever sent to the address, so nobody gains by having another node dial it.
"""

import asyncio
import ssl

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarm.records.identity import verify

_MULTISTREAM = b"/multistream/1.0.0\n"
_TLS = b"/tls/1.0.0\n"
_MAX_LINE_BYTES = 64
_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_PREFIX = b"libp2p-tls-handshake:"
_SIGNATURE_BYTES = 64
_NOT_A_CERTIFICATE = (
    ValueError,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    UnsupportedAlgorithm,
)
_SIGNATURE_HEAD = bytes.fromhex("0440")
"""The extension ends in an OCTET STRING of 64 bytes in DER: the signature."""


async def answers_as(peer_id: str, host: str, port: int, *, timeout_s: float) -> bool:
    """Return whether the peer itself answers at this address in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return is_signed_by(peer_id, await _certificate_at(host, port))
    except (OSError, EOFError, ValueError):  # OSError includes TimeoutError and ssl.SSLError
        return False


async def _certificate_at(host: str, port: int) -> bytes:
    """Return the listener's certificate in DER. Raises OSError, EOFError or ValueError."""
    reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES)
    try:
        for line in (_MULTISTREAM, _TLS):
            writer.write(bytes([len(line)]) + line)
            answer = await reader.readexactly(1 + len(line))
            if answer[1:] != line:
                raise ValueError("does not speak libp2p over TLS")
        await writer.start_tls(_client_context())
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if certificate is None:
            raise ValueError("shows no certificate")
        return certificate
    finally:
        writer.transport.abort()


def is_signed_by(peer_id: str, certificate_der: bytes) -> bool:
    """Return whether this is a libp2p TLS certificate that the peer signed."""
    try:
        certificate = x509.load_der_x509_certificate(certificate_der)
        extension = certificate.extensions.get_extension_for_oid(_EXTENSION).value
        session_key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except _NOT_A_CERTIFICATE:
        return False
    signed_key = extension.value if isinstance(extension, x509.UnrecognizedExtension) else b""
    head, signature = signed_key[-_SIGNATURE_BYTES - 2 : -_SIGNATURE_BYTES], signed_key[-_SIGNATURE_BYTES:]
    # The public key in the extension is not used; the one in the peer id counts.
    return head == _SIGNATURE_HEAD and verify(peer_id, _SIGNED_PREFIX + session_key, signature)


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the proof is the peer's signature inside the certificate
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    return context
