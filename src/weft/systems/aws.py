"""What connections to AWS share, and to servers that speak its protocols."""

from __future__ import annotations

from typing import Any

from weft.errors import DeclarationError


def check_keys(connection: Any) -> None:
    """Refuse keys of which a part is missing."""
    if (connection.access_key_id is None) != (connection.secret_access_key is None):
        raise DeclarationError(
            f"{connection.label} needs both access_key_id and secret_access_key.",
            hint="Or neither: then those of the environment are used.",
        )
    if connection.session_token is not None and connection.access_key_id is None:
        raise DeclarationError(f"A session_token needs access_key_id and secret_access_key ({connection.label}).")
