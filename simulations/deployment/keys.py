"""Writes the certificates and keys that the processes of a deployment on this machine read."""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from flwr_privacy.simulations.engines.flower_processes import HOST

__all__ = ["write_certificates", "write_node_key"]

ISSUER = "flwr-privacy deploy"
DAYS = 365

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


def write_certificates(folder: Path) -> tuple[Path, Path]:
    """Write ``ca.pem`` and, signed by it, a server's certificate for loopback and its key.

    The private key of the CA is written nowhere: it signs nothing else. Certificates are valid for
    a year. What was there before is replaced.

    Returns
    -------
    certificate, key : Path
        ``superlink.pem`` and ``superlink.key`` (for its owner alone, mode 0600) in `folder`.
    """
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
    ca = _certificate(ISSUER, ca_key.public_key(), issuer=ca_key, is_ca=True)
    server = _certificate("SuperLink", key.public_key(), issuer=ca_key, is_ca=False)
    server = server.add_extension(x509.SubjectAlternativeName(names), critical=False)
    for name, certificate in (("ca.pem", ca), ("superlink.pem", server)):
        signed = certificate.sign(ca_key, hashes.SHA256())
        (folder / name).write_bytes(signed.public_bytes(Encoding.PEM))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write_private(folder / "superlink.key", pem)
    return folder / "superlink.pem", folder / "superlink.key"


def write_node_key(folder: Path) -> tuple[Path, Path]:
    """Write the key pair by which a SuperLink knows a SuperNode.

    It is an elliptic-curve key (P-384) in OpenSSH's format, as ``ssh-keygen -t ecdsa -b 384`` makes
    it. What was there before is replaced.

    Returns
    -------
    private, public : Path
        ``node.key`` (mode 0600) for the SuperNode and ``node.pub`` for the SuperLink, in `folder`.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / "node.key", folder / "node.pub"
    _write_private(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return private, public


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # an old file keeps its rights, a new one has ours
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)


def _certificate(
    subject: str, public_key: PublicKey, *, issuer: PrivateKey, is_ca: bool
) -> x509.CertificateBuilder:
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, ISSUER)
    ]
    uses = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    ) | {"encipher_only": False, "decipher_only": False}
    uses |= {"digital_signature": not is_ca, "key_cert_sign": is_ca, "crl_sign": is_ca}
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), True),
        (x509.KeyUsage(**uses), True),
        (x509.SubjectKeyIdentifier.from_public_key(public_key), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), False),
    ]
    certificate = x509.CertificateBuilder(
        subject_name=names[0],
        issuer_name=names[1],
        public_key=public_key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - day,
        not_valid_after=now + DAYS * day,
    )
    for extension, critical in extensions:
        certificate = certificate.add_extension(extension, critical=critical)
    return certificate
