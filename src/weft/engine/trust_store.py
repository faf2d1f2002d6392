"""The certificates that Python trusts, in the form that Java reads."""

from __future__ import annotations

import hashlib
import ssl
import struct
from pathlib import Path

_PASSWORD = "changeit"


def java_options(path: Path) -> list[str]:
    """Write a trust store with the certificates that Python trusts, and give the options that make Java use it.

    A Java runtime brings its own list and does not look at the system's, so that behind a company's proxy pip works and
    Java does not. Nothing where Python's list cannot be read: then Java's own stays.
    """
    certificates = _certificates()
    if not certificates:
        return []
    path.write_bytes(_jks(certificates))
    return [
        f"-Djavax.net.ssl.trustStore={path}",
        "-Djavax.net.ssl.trustStoreType=JKS",
        f"-Djavax.net.ssl.trustStorePassword={_PASSWORD}",
    ]


def _certificates() -> list[bytes]:
    context = ssl.create_default_context()
    folder = ssl.get_default_verify_paths().capath
    if not context.get_ca_certs() and folder:
        # OpenSSL reads a folder only when it meets an issuer, and lists nothing of it before.
        for each in sorted(Path(folder).glob("*.[pc][er][mt]")):
            try:
                context.load_verify_locations(each)
            except (ssl.SSLError, OSError):
                continue
    return context.get_ca_certs(binary_form=True)


def _jks(certificates: list[bytes]) -> bytes:
    """Java's key store, with nothing but trusted certificates: the one format that every Java reads and that takes no
    more than hashing to write."""
    parts = [struct.pack(">III", 0xFEEDFEED, 2, len(certificates))]
    for number, certificate in enumerate(certificates):
        parts += [struct.pack(">I", 2), _utf(f"python-{number}"), struct.pack(">Q", 0), _utf("X.509")]
        parts += [struct.pack(">I", len(certificate)), certificate]
    body = b"".join(parts)
    return body + hashlib.sha1(_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + body).digest()


def _utf(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()
