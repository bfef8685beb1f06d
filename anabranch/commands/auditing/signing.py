"""Signs statements, and checks signatures: DSSE envelopes with Ed25519 keys.

The form of an envelope is https://github.com/secure-systems-lab/dsse, protocol version 1.0.2. The package
`cryptography` is known here alone.
"""

import base64
import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from anabranch.core.errors import SettingsError
from anabranch.core.failures import UNDECODABLE
from anabranch.runtime.private_state import is_open_to_others

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

log = logging.getLogger(__name__)

PAYLOAD_TYPE = "application/vnd.in-toto+json"
_HOW = "openssl genpkey -algorithm ed25519 -out FILE"


class EnvelopeSignature(msgspec.Struct, frozen=True):
    """One signature of an envelope; `sig` is in base64."""

    sig: str
    keyid: str = ""


class Envelope(msgspec.Struct, frozen=True, rename="camel"):
    """A signed payload, in base64."""

    payload: str
    payload_type: str
    signatures: list[EnvelopeSignature]


def sign(payload: bytes, key: Path) -> dict[str, Any]:
    """Return a DSSE envelope of a payload, as JSON values.

    Raises:
        SettingsError: the file has no Ed25519 private key, or `cryptography` is not installed.
    """
    _check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if is_open_to_others(key):
        log.warning("%s may be read by users other than its owner, who can sign as you: chmod 600 %s", key, key)
    try:
        private = load_pem_private_key(_read(key), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:  # TypeError: it is encrypted
        raise SettingsError(f"{key} has no private key without a password in PEM; make one: {_HOW}") from exc
    if not isinstance(private, Ed25519PrivateKey):
        raise SettingsError(f"{key} has a key of another kind than Ed25519; make one: {_HOW}")
    signature = private.sign(_encoded(PAYLOAD_TYPE, payload))
    envelope = Envelope(
        _text(payload), PAYLOAD_TYPE, [EnvelopeSignature(_text(signature), key_id(private.public_key()))]
    )
    document: dict[str, Any] = msgspec.to_builtins(envelope)
    return document


def verified(envelope: bytes, key: Path) -> tuple[bytes, str]:
    """Return the payload of an envelope, and the id of the key that has signed it.

    Args:
        envelope: as JSON.
        key: a PEM file with the public key, or with the private one.

    Raises:
        SettingsError: it is no envelope, or none of its signatures is of this key.
    """
    public = _public_key(key)
    from cryptography.exceptions import InvalidSignature

    try:
        decoded = msgspec.json.decode(envelope, type=Envelope)
        payload = _bytes(decoded.payload)
        signatures = [_bytes(each.sig) for each in decoded.signatures]
    except (*UNDECODABLE, ValueError) as exc:
        raise SettingsError(
            "it is no signed statement: write the file that versions lineage --sign-key printed"
        ) from exc
    if decoded.payload_type != PAYLOAD_TYPE:
        raise SettingsError(f"its payload is {decoded.payload_type[:80]!r}, not {PAYLOAD_TYPE}")
    for signature in signatures:
        try:
            public.verify(signature, _encoded(decoded.payload_type, payload))
        except InvalidSignature:
            continue
        return payload, key_id(public)
    raise SettingsError(f"the signature is NOT valid: it is not of the key in {key}, or the statement was changed")


def key_id(public: "Ed25519PublicKey") -> str:
    """Return the SHA-256 of a public key in DER."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _public_key(path: Path) -> "Ed25519PublicKey":
    _check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

    content = _read(path)
    try:
        key = load_pem_public_key(content) if b"PUBLIC KEY" in content else load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise SettingsError(f"{path} has no Ed25519 key without a password in PEM") from exc
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    if not isinstance(public, Ed25519PublicKey):
        raise SettingsError(f"{path} has a key of another kind than Ed25519")
    return public


def _encoded(kind: str, payload: bytes) -> bytes:
    """Return what is signed: the pre-authentication encoding of DSSE."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str) -> bytes:
    """Return what is encoded, in the standard or the URL-safe form of base64: DSSE allows both."""
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise SettingsError(f"{path} cannot be read: {exc.strerror}") from exc


def _check_installed() -> None:
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError as exc:
        raise SettingsError("signatures need the package cryptography: pip install 'anabranch[sign]'") from exc
