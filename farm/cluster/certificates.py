"""A certificate for one start of a farm: made in memory, carried by tickets, worth nothing to the next start.

All members have the same one, because Dask knows no roles: any holder can run code in the whole cluster.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from farm.cluster.ticket import Credentials
from farm.errors import UsageError

# A worker's clock may be behind; and a run may go on for months.
_BEFORE = timedelta(days=1)
_AFTER = timedelta(days=730)
_AUTHORITY = "rollout-farm authority"
_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def make_credentials() -> Credentials:
    """An own authority, whose key is thrown away, and one certificate of it (ECDSA P-256).

    Raises ``UsageError`` when the package ``cryptography`` is missing."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise UsageError(
            "cluster: workers on other hosts need TLS, which needs the package cryptography; "
            "pip install 'rollout-farm[cluster]'"
        ) from None

    authority, member = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)

    def certificate(name: str, key: Any, *, ca: bool) -> str:
        usage = dict.fromkeys(_USAGES, False) | ({"key_cert_sign": True} if ca else {"digital_signature": True})
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _AUTHORITY)]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BEFORE)
            .not_valid_after(now + _AFTER)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
            .sign(authority, hashes.SHA256())
        )
        return str(made.public_bytes(serialization.Encoding.PEM).decode())

    key = member.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Credentials(
        ca=certificate(_AUTHORITY, authority.public_key(), ca=True),
        cert=certificate("rollout-farm", member.public_key(), ca=False),
        key=key.decode(),
    )


def write_credentials(folder: Path) -> None:
    """``ca.pem``, ``cert.pem`` and ``key.pem`` in ``folder``, readable by their owner only; for a scheduler and workers
    that the farm does not start itself. Raises ``UsageError`` when one is there already."""
    paths = {name: folder / f"{name}.pem" for name in ("ca", "cert", "key")}
    for path in paths.values():  # all before the first is written: an authority beside a foreign key locks members out
        if os.path.lexists(path):
            raise UsageError(f"{path}: is there already; name a new folder, so that no member is locked out")
    made = make_credentials()
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(getattr(made, name))


def main() -> int:
    """``python -m farm.cluster.certificates FOLDER``; exit code."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m farm.cluster.certificates FOLDER", file=sys.stderr)
        return 2
    try:
        write_credentials(Path(sys.argv[1]))
    except UsageError as error:
        print(f"farm: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
