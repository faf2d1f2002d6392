"""A client of Confluent's API for schema registries, which others have too (Apicurio, Karapace, Redpanda).

It is a few requests of HTTP. The client of confluent-kafka brings seven more packages for them.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from weft import settings
from weft.errors import ConnectionFailedError, DeclarationError, SettingsError, StorageError
from weft.systems.codec import Registered

if TYPE_CHECKING:
    from weft.systems.schema_registry.connection import SchemaRegistryConnection

_TYPE = "application/vnd.schemaregistry.v1+json"
_SECONDS = 10.0
# A registry that restarts is away for a moment.
_PAUSES = (0.2, 1.0)
_AWAY = (429, 500, 502, 503, 504)
_UNKNOWN = (40401, 40402, 40403)
_INCOMPATIBLE = 409
# Schemas by registry and id. A schema never changes, so each process asks once.
_known: dict[tuple[str, int], Registered] = {}


class SchemaRegistry:
    """A registry, as one process sees it. It travels to Spark's tasks."""

    def __init__(self, connection: SchemaRegistryConnection) -> None:
        self._connection = connection.resolved()

    def schema(self, number: int) -> Registered | None:
        """Return the schema of an id; `None` where the registry has none."""
        key = (self._connection.base_url, number)
        if key not in _known:
            answer = self._ask(f"/schemas/ids/{number}")
            if answer is None:
                return None
            _known[key] = self._registered(number, answer)
        return _known[key]

    def newest(self, subject: str) -> Registered | None:
        """Return the newest schema of a subject; `None` where there is no such subject."""
        answer = self._ask(f"/subjects/{quote(subject, safe='')}/versions/latest")
        return None if answer is None else self._registered(answer["id"], answer)

    def subjects(self) -> list[str]:
        subjects: list[str] = self._ask("/subjects") or []
        return subjects

    def register(self, subject: str, kind: str, text: str) -> int:
        """Register a schema, unless it is there already, and return its id. Raise for one that the registry refuses."""
        body = {"schema": text, **({} if kind == "AVRO" else {"schemaType": kind})}
        answer = self._ask(f"/subjects/{quote(subject, safe='')}/versions", body)
        if answer is None:
            raise StorageError(f"The registry of {self._connection.label} has no subject {subject!r} and makes none.")
        return int(answer["id"])

    def _registered(self, number: int, answer: dict[str, Any]) -> Registered:
        references: dict[str, str] = {}
        for each in answer.get("references") or ():
            path = f"/subjects/{quote(each['subject'], safe='')}/versions/{each['version']}"
            part = self._ask(path)
            if part is None:
                raise StorageError(
                    f"The schema {number} refers to version {each['version']} of {each['subject']!r}, which "
                    f"{self._connection.label} does not have."
                )
            references |= dict(self._registered(part["id"], part).references)
            references[each["name"]] = part["schema"]
        return Registered(number, answer.get("schemaType") or "AVRO", answer["schema"], tuple(references.items()))

    # ------------------------------------------------------------------------------------------------------------- HTTP

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a request; `None` for what the registry says that it does not have."""
        request = Request(
            self._connection.base_url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Accept": f"{_TYPE}, application/json", "Content-Type": _TYPE},
        )
        if (sign_in := self._sign_in()) is not None:
            request.add_unredirected_header("Authorization", sign_in)  # a server that it redirects to does not get it
        for pause in (*_PAUSES, None):
            try:
                with self._opener().open(request, timeout=_SECONDS) as answer:
                    return json.load(answer)
            except HTTPError as error:
                said = _said(error)
                if error.code == 404 and said.get("error_code") in _UNKNOWN:
                    return None
                if error.code not in _AWAY or pause is None:
                    raise self._refused(error.code, said, path) from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = error.reason if isinstance(error, URLError) else error
                is_final = isinstance(reason, ssl.SSLError) or isinstance(error, ValueError)
                if pause is None or is_final:
                    raise self._away(reason if isinstance(reason, BaseException) else error) from None
            time.sleep(pause)
        raise AssertionError  # the last attempt raises

    def _sign_in(self) -> str | None:
        if self._connection.bearer_token is not None:
            return f"Bearer {self._connection.bearer_token}"
        user = self._connection.user
        return None if user is None else f"Basic {base64.b64encode(':'.join(user).encode()).decode()}"

    def _opener(self) -> Any:
        registry = self._connection
        context = ssl.create_default_context()
        try:
            if registry.ssl_ca_location:
                context.load_verify_locations(Path(registry.ssl_ca_location).expanduser())
            if registry.ssl_certificate_location and registry.ssl_key_location:
                certificate, key = Path(registry.ssl_certificate_location), Path(registry.ssl_key_location)
                context.load_cert_chain(certificate.expanduser(), key.expanduser(), registry.ssl_key_password or "")
        except OSError as error:
            raise SettingsError(
                f"A certificate of {registry.label} cannot be read: {error.strerror or error}."
            ) from None
        return build_opener(HTTPSHandler(context=context), ProxyHandler())

    def _away(self, error: BaseException) -> ConnectionFailedError:
        return self._connection.unreachable(error, answered=False)

    def _refused(self, code: int, said: dict[str, Any], path: str) -> Exception:
        registry = self._connection
        text = " ".join(settings.redact(str(said.get("message", "")), registry.secrets()).split())[:500].rstrip(".")
        if code in (401, 403):
            return ConnectionFailedError(
                f"{registry.label} ({registry.target}) refuses us with {code}{f': {text}' if text else ''}.",
                hint="Check basic_auth_user and basic_auth_password, or bearer_token.",
            )
        if code == _INCOMPATIBLE:
            return DeclarationError(f"{registry.label} refuses the schema: it is not compatible. {text}.")
        hint = "Check the path of its URL." if code in (404, 405) else None
        return ConnectionFailedError(
            f"{registry.label} ({registry.target}) answers {path} with {code}{f': {text}' if text else ''}.", hint=hint
        )


def _said(error: HTTPError) -> dict[str, Any]:
    try:
        answer = json.loads(error.read(1 << 16))
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return answer if isinstance(answer, dict) else {}
