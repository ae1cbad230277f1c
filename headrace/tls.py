"""TLS between the hosts of a run, with one certificate that the launcher makes for it.

Nobody vouches for the certificate: a peer knows its fingerprint, which the launcher tells it, or learns it from a listener that
proves the run's token for exactly this fingerprint (`headrace.rpc`). So no clock is compared and no name is looked up.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import ssl
import tempfile

from headrace.settings import ConfigError

_LIFE = datetime.timedelta(days=3650)


def make_certificate() -> str:
    """A new key and its certificate, as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError("engines on other hosts need a certificate: pip install 'headrace[cluster]'") from error

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "headrace")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - _LIFE, now + _LIFE)
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (private + builder.sign(key, hashes.SHA256()).public_bytes(encoding)).decode()


def fingerprint(certificate: str) -> str:
    """Of a certificate as `make_certificate` returns it; empty for none."""
    if not certificate:
        return ""
    return _digest(ssl.PEM_cert_to_DER_cert(certificate[certificate.index("-----BEGIN CERTIFICATE") :]))


def peer_fingerprint(connection: ssl.SSLSocket | ssl.SSLObject) -> str:
    return _digest(connection.getpeercert(binary_form=True) or b"")


def check_peer(connection: ssl.SSLSocket | ssl.SSLObject, wanted: str) -> None:
    if not hmac.compare_digest(peer_fingerprint(connection), wanted):
        raise PermissionError("the peer has another certificate than this run")


def _digest(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


def server_context(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # only this user may read it; `ssl` reads files alone
        file.write(certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def client_context() -> ssl.SSLContext:
    """Accepts any certificate: the caller then compares fingerprints."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
