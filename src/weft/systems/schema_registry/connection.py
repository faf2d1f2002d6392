"""How to reach a schema registry that speaks Confluent's API."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as option
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from weft.errors import DeclarationError
from weft.systems.base import Connection, measured
from weft.systems.endpoint import Endpoint


@dataclass(frozen=True)
class SchemaRegistryConnection(Connection):
    """A schema registry: `SchemaRegistryConnection("https://registry:8081", basic_auth_user="weft", …)`.

    A user and a password may be in the URL, too. `bearer_token` signs in without them. Certificates are PEM files.
    """

    kind: ClassVar[str] = "schema_registry"

    url: str = option(metadata={"url": True})
    basic_auth_user: str | None = option(default=None, kw_only=True)
    basic_auth_password: str | None = option(default=None, kw_only=True, metadata={"secret": True})
    bearer_token: str | None = option(default=None, kw_only=True, metadata={"secret": True})
    ssl_ca_location: str | None = option(default=None, kw_only=True)
    ssl_certificate_location: str | None = option(default=None, kw_only=True)
    ssl_key_location: str | None = option(default=None, kw_only=True)
    ssl_key_password: str | None = option(default=None, kw_only=True, metadata={"secret": True})

    def validate(self) -> None:
        """Raise for fields that contradict each other."""
        super().validate()
        for one, other in (
            ("basic_auth_user", "basic_auth_password"),
            ("ssl_certificate_location", "ssl_key_location"),
        ):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise DeclarationError(f"{self.label} needs {one} and {other}, both or neither.")
        if self.is_known("url"):
            parts = urlsplit(self.url)
            if not parts.hostname:
                raise DeclarationError(f"The url of {self.label} has no host.", hint='url="http://localhost:8081"')
            ways = [parts.username, self.basic_auth_user, self.bearer_token]
            if sum(each is not None for each in ways) > 1:
                raise DeclarationError(
                    f"{self.label} signs in in two ways.",
                    hint="Give basic_auth_user and basic_auth_password, or a user in the URL, or a bearer_token.",
                )

    @property
    def base_url(self) -> str:
        """The URL without a user and without a slash at its end."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")

    @property
    def user(self) -> tuple[str, str] | None:
        """The user and the password, of the fields or of the URL."""
        if self.basic_auth_user is not None:
            return self.basic_auth_user, self.basic_auth_password or ""
        parts = urlsplit(self.url)
        return None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))

    def check(self) -> dict[str, Any]:
        from weft.systems.schema_registry.client import SchemaRegistry

        report: dict[str, Any] = {}
        with measured(report):
            subjects = SchemaRegistry(self).subjects()
        return {"server": "Schema registry", "subjects": len(subjects), **report}


class SchemaRegistryEndpoint(Endpoint):
    """Neither a source nor a target: it holds no messages."""
