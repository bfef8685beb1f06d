"""Certificates of this host."""

import ipaddress
import os
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class CertificateFactory:
    """Writes certificates of this host, with their keys, to a folder."""

    def __init__(self, folder):
        self._folder = folder

    def __call__(self, days, name="server", issued=False, subject_name="localhost"):
        """Return the paths of a certificate that is valid for `days` more days, and of its key.

        It is signed by its own key; with `issued`, by the key of an authority that is not kept.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject_name)])
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]) if issued else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=400))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(ec.generate_private_key(ec.SECP256R1()) if issued else key, hashes.SHA256())
        )
        cert_path, key_path = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        key_path.write_bytes(key.private_bytes(*plain))
        return cert_path, key_path


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory):
    """Trust one authority. Each HTTP client reads the certificates of all, and those of the web take it 15 ms."""
    # Its name differs from that of the tests' servers, whose own certificates would be searched for under it.
    authority, _ = CertificateFactory(tmp_path_factory.mktemp("authority"))(days=3, subject_name="nobody")
    os.environ["SSL_CERT_FILE"] = str(authority)


@pytest.fixture
def certificate(tmp_path):
    """Writes a certificate: `certificate(days, name="server", issued=False) -> (certificate, key)`."""
    return CertificateFactory(tmp_path)
