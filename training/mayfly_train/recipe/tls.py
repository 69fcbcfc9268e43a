"""Certificates that are made for one run: only who has its key may talk to its engine.

`python -m mayfly_train.recipe.tls RUN` prints new ones as the line that role engine takes.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

CA, CERTIFICATE, KEY = "ca.pem", "node.pem", "node.key"
VALID = dt.timedelta(days=60)
_SKEW = dt.timedelta(hours=1)  # nodes' clocks may be behind


def make(directory: Path, run: str) -> None:
    """An authority and one key pair that it has signed, as files for the owner only."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, data in _pems(run).items():
        _write(directory / name, data)


def bundle(run: str) -> str:
    """The same as one line of text, base64 of a JSON document, which no file has seen."""
    document = {name: data.decode() for name, data in _pems(run).items()}
    return base64.b64encode(json.dumps(document).encode()).decode()


def _pems(run: str) -> dict[str, bytes]:
    """The content of each file.

    The authority's own key is not kept: nobody can sign another. Dask knows no roles, so one pair
    serves head and workers alike: whoever has it can run code on every node of the run.
    """
    authority_key, key = (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )
    authority = _name(f"mayfly run {run}")
    root = (
        _builder(authority, authority, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    node = (
        _builder(_name(f"mayfly node of {run}"), authority, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return {
        CA: root.public_bytes(pem),
        CERTIFICATE: node.public_bytes(pem),
        KEY: key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + VALID)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(data)


if __name__ == "__main__":
    print(bundle(sys.argv[1] if len(sys.argv) > 1 else "run"))
