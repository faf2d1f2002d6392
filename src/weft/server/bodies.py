"""Bodies: bounded while they are read and while they are unpacked, then parsed in one go."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from starlette.requests import Request

from weft.errors import listed
from weft.server.problems import Problem, bad_parameter, later
from weft.types import exact_number, half_character, to_json

if TYPE_CHECKING:
    from starlette.types import Scope

_JSON = ("application/json",)
_CHARSET = re.compile(r';\s*charset\s*=\s*"?([^";\s]*)', re.IGNORECASE)
_LINES = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")
_CODINGS = {"gzip": "gzip", "x-gzip": "gzip", "zstd": "zstd"}
_CHUNK = 1 << 16
# For each event that a body may have, so many objects and arrays, and so many values. And keys of one event.
_NESTED, _VALUES, _KEYS = 5, 20, 10_000
# The keys of a request's scope for a body that is read twice, and for the memory that a body takes.
_HELD, _RESERVED = "weft.body", "weft.body_reserved"
# A search of a longer body takes numpy less time.
_SHORT = 4096
_BYTE = re.compile(r"\(byte (\d+)\)")
_KEY_COLON = re.compile(rb'"[ \t\r\n]*:')
_BEGINS = re.compile(r"[^ \t\r\n]")
_UNKNOWN = re.compile(r"unknown field `(.*)`")

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class Bodies:
    """Reads the bodies of requests: each of at most `most` bytes in at most `seconds`, and those that arrive in parts
    of at most `memory` bytes together. A client that sends a byte now and then would hold its connection
    indefinitely."""

    def __init__(self, most: int, seconds: float, memory: int) -> None:
        self.most = most
        self._seconds = seconds
        self._memory = memory
        self._reserved = 0
        # One timer for all that arrive, oldest first: a timer each takes as long as half of a publish.
        self._arriving: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, request: Request) -> bytes:
        """Return the body as it was sent."""
        held: bytes | None = request.scope.get(_HELD)
        if held is not None:
            return held
        length = request.headers.get("content-length")
        if length is not None and length.isdecimal() and int(length) > self.most:
            raise too_large(self.most)
        task = asyncio.current_task()
        assert task
        self._arriving[task] = asyncio.get_running_loop().time()
        if self._timer is None:
            self._await_oldest()
        try:
            body = await self._parts(request)
        except asyncio.CancelledError:
            if task not in self._late or task.uncancel():
                raise
            text = f"The body did not arrive within {self._seconds:g} seconds."
            raise Problem(408, "slow", "Too slow", text, headers={"connection": "close"}) from None
        finally:
            self._arriving.pop(task, None)
            self._late.discard(task)
        if length is not None and length.isdecimal() and int(length) != len(body):
            raise _cut_off()
        # Servers that know of no other protocol drop the body of a request that asks for one.
        if not body and "upgrade" in request.headers and "transfer-encoding" in request.headers:
            raise _cut_off()
        return body

    async def hold(self, request: Request) -> bytes:
        """Read the body and keep it for a second reader."""
        body = request.scope[_HELD] = await self.read(request)
        return body

    def release(self, scope: Scope) -> None:
        """Release the memory of a request that was answered."""
        self._reserved -= scope.pop(_RESERVED, 0)

    async def _parts(self, request: Request) -> bytes:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise _cut_off()
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > self.most:
                raise too_large(self.most)
            if parts or more:
                self._reserve(request.scope, len(part))
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _reserve(self, scope: Scope, size: int) -> None:
        if self._reserved + size > self._memory:
            text = "The bodies that arrive now take all the memory that they may."
            problem = later(503, "overloaded", "Too much at once", text, 1.0)
            problem.headers["connection"] = "close"  # the rest of it is not read
            raise problem
        self._reserved += size
        scope[_RESERVED] = scope.get(_RESERVED, 0) + size

    def _await_oldest(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = next(iter(self._arriving.values()), None)
        self._timer = None if oldest is None else loop.call_at(oldest + self._seconds, self._end_late)

    def _end_late(self) -> None:
        overdue = asyncio.get_running_loop().time() - self._seconds
        for task in [task for task, began in self._arriving.items() if began <= overdue]:
            del self._arriving[task]
            self._late.add(task)
            task.cancel()
        self._await_oldest()


def _cut_off() -> Problem:
    """Return the refusal of a body that did not arrive whole, also where no client can read it any more."""
    return Problem(400, "cut-off", "The connection was cut", "The body did not arrive whole.")


def too_large(most: int) -> Problem:
    """Return the refusal of a body that is not read any further."""
    return Problem(
        413,
        "too-large",
        "Too large",
        f"A body may have {most:,} bytes, unpacked. Send several smaller ones.",
        headers={"connection": "close"},
        limit=most,
    )


def _bad_event(index: int, field: str | None, why: str) -> Problem:
    where = f"Event {index}" if field is None else f"Event {index}, field {field!r}"
    return Problem(422, "event", "An event does not fit", f"{where}: {why}.", index=index, field=field)


def _too_many(most: int) -> Problem:
    text = (
        f"A body may have {most:,} events, {most * _NESTED:,} objects and arrays, and {most * _VALUES:,} values, "
        "counted by their braces, brackets and commas. Send several smaller ones."
    )
    return Problem(413, "too-many", "Too many events", text, limit=most)


def unpack(body: bytes, headers: Mapping[str, str], most: int) -> bytes:
    """Undo the content coding; never more than `most` bytes, however far they expand."""
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding == "identity":
        return body
    if coding not in _CODINGS:
        text = f"The content coding {coding[:40]!r} is not known: send gzip, zstd or none."
        raise Problem(415, "coding", "Unknown coding", text, headers={"accept-encoding": "gzip, zstd"})
    parts: list[bytes] = []
    size = 0
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), _CODINGS[coding]) as unpacked:
            while part := unpacked.read(_CHUNK):
                size += len(part)
                if size > most:
                    raise too_large(most)
                parts.append(part)
    except OSError:
        text = f"The body is not {coding}, or was cut off."
        raise Problem(400, "coding", "The body cannot be unpacked", text) from None
    return b"".join(parts)


def events(body: bytes, headers: Mapping[str, str], most: int) -> Any:
    """Parse the event or the events of a body: JSON, or a line each. At most `most` of them."""
    kind = media_type(headers)
    if kind not in _LINES:
        require_json(kind, (*_JSON, _LINES[0]))
    charset = _CHARSET.search(headers.get("content-type", ""))
    if charset is not None and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        # Bytes of another one may be UTF-8 too, but of other letters.
        text = f"The body must be UTF-8, not {charset[1][:60]!r}."
        raise Problem(415, "media-type", "Unknown character set", text)
    # Before they are parsed, which blocks all requests: 16 MiB may hold millions.
    if len(body) > most * _NESTED and (
        body.count(b"{") + body.count(b"[") > most * _NESTED
        or body.count(b",") + (body.count(b"\n") if kind in _LINES else 0) > most * _VALUES
    ):
        raise _too_many(most)
    try:
        parsed = _decoded(body, _decoder.decode_lines if kind in _LINES else _decoder.decode)
    except msgspec.ValidationError as error:  # a number that no field type holds
        index, field = _culprit(body, kind in _LINES)
        raise _bad_event(index, field, str(error).partition(" - at")[0].lower()) from None
    several = parsed if isinstance(parsed, list) else [parsed]
    if len(several) > most:
        raise _too_many(most)
    for index, event in enumerate(several):
        if type(event) is not dict:
            raise _bad_event(index, None, "it is not a JSON object")
        if len(event) > _KEYS:
            raise _bad_event(index, None, f"it has {len(event):,} fields, of {_KEYS:,} that it may have")
    repeated = _repeated_key(body, several)
    if repeated is not None:
        index, field = repeated
        raise _bad_event(index, field, "the key is there twice in one object")
    return parsed


def _repeated_key(body: bytes, parsed: list[Any]) -> tuple[int, str] | None:
    """Return the index of the first event that has a key twice in one object, of which the parser keeps the last, and
    that key. A key of a body is followed by a quotation mark and a colon, and so it is where what was parsed is encoded
    again, unless the body escapes one of them. Only a body that has more of them, or that cannot be compared so, is
    parsed in a slower way."""
    keys = sum(map(len, parsed))
    if body.count(b":") == keys:
        return None
    colons = _key_colons(body)
    if colons == keys:
        return None
    if b"\\u00" not in body and _key_colons(_encode(parsed)) == colons:
        return None
    with suppress(ValueError, RecursionError):  # of what the first parser took
        for index, event in enumerate(_pairs(body.decode())):
            if isinstance(event, _Repeated):
                return index, str(event)
    return None


def _key_colons(text: bytes) -> int:
    """Return how many colons follow a quotation mark, with white space between them or without."""
    if len(text) < _SHORT:
        return len(_KEY_COLON.findall(text))
    codes = np.frombuffer(text, np.uint8)
    before = codes[np.flatnonzero(codes[1:] == ord(":"))]
    if (before <= ord(" ")).any():
        return len(_KEY_COLON.findall(text))
    return int(np.count_nonzero(before == ord('"')))


class _Repeated(str):
    """A key that is in one object twice."""


def _pairs(text: str) -> Iterator[Any]:
    """Yield what `_object` finds in each event, on whatever lines it begins and ends."""
    at = 0
    while start := _BEGINS.search(text, at):
        parsed, at = _PAIRS.raw_decode(text, start.start())
        yield from parsed if isinstance(parsed, list) else [parsed]


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """Return a repeated key in the place of the object that has it, or in which such an object is."""
    keys: set[str] = set()
    for key, value in pairs:
        if key in keys:
            return _Repeated(key)
        repeated = _found_in(value)
        if repeated is not None:
            return repeated
        keys.add(key)
    return None


def _found_in(value: Any) -> _Repeated | None:
    if isinstance(value, list):
        return next((repeated for each in value if (repeated := _found_in(each)) is not None), None)
    return value if isinstance(value, _Repeated) else None


_PAIRS = json.JSONDecoder(object_pairs_hook=_object, parse_int=str, parse_float=str, strict=False)


def restore_decimals(
    events: list[dict[str, Any]], body: bytes, headers: Mapping[str, str], names: tuple[str, ...]
) -> None:
    """Put a decimal in the place of each float among these fields that is not the number that the body has."""
    if not any(float in set(map(type, map(methodcaller("get", name), events))) for name in names):
        return
    decoder, list_decoder = _decimal_decoders(names)
    if media_type(headers) in _LINES:
        written = decoder.decode_lines(body)
    else:
        written = list_decoder.decode(body) if body.lstrip().startswith(b"[") else [decoder.decode(body)]
    for event, texts in zip(events, written, strict=True):
        for name, text in texts.items():
            if type(event[name]) is float:
                event[name] = exact_number(event[name], str(memoryview(text), "ascii"))


@lru_cache(maxsize=256)
def _decimal_decoders(names: tuple[str, ...]) -> tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]:
    """Return decoders of an event and of a list of them that read these fields alone, as the texts that they are."""
    kind = TypedDict("Texts", dict.fromkeys(names, msgspec.Raw), total=False)  # type: ignore[misc]
    return msgspec.json.Decoder(kind), msgspec.json.Decoder(list[kind])


def media_type(headers: Mapping[str, str]) -> str:
    """Return the content type without its parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def require_json(kind: str, wanted: tuple[str, ...] = _JSON) -> None:
    """Refuse another content type, also a missing one: a browser lets a page of another site send such a request
    without asking this service for permission."""
    if kind not in _JSON:
        actual = f"not {kind[:60]!r}" if kind else "and none was given"
        text = f"The content type must be {' or '.join(wanted)}, {actual}."
        raise Problem(415, "media-type", "Unknown content type", text, headers={"accept-post": ", ".join(wanted)})


def parse(body: bytes, kind: type[S]) -> S:
    """Parse the body of a request that is no event."""
    try:
        parsed = _decoded(body, lambda text: msgspec.json.decode(text, type=kind))
        repeated = _repeated_key(body, [_decoder.decode(body)])
        if repeated is not None:
            raise bad_parameter(f"The member {repeated[1][:60]!r} is there twice.", field=repeated[1][:60])
        return parsed
    except msgspec.ValidationError as error:
        name = _UNKNOWN.search(str(error))
        if name is None:
            raise bad_parameter(f"{error}.") from None
        unknown, members = name[1][:60], [field.encode_name for field in msgspec.structs.fields(kind)]
        text = listed(unknown, members, f"There are {', '.join(members)}.")
        raise bad_parameter(f"There is no member {unknown!r} here. {text}", field=unknown) from None


def _decoded(body: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(body)
    except RecursionError:
        raise Problem(400, "malformed", "Malformed JSON", "The body is nested too deeply.") from None
    except UnicodeDecodeError:
        raise _malformed(body, "it is not UTF-8", _not_utf8(body)) from None
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        byte = _BYTE.search(str(error))
        why = str(error).removeprefix("JSON is malformed: ").partition(" (byte")[0]
        if body.startswith(codecs.BOM_UTF8) or body[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise _malformed(body, "it begins with a byte order mark; send UTF-8 without one", 0) from None
        if ("surrogate" in why or "truncated" in why) and (half := half_character(body)) is not None:
            why = f"the escape {half[1].decode()} stands for half a character"
            raise _malformed(body, why, half.start(1)) from None
        raise _malformed(body, why[:1].lower() + why[1:], int(byte[1]) if byte else len(body)) from None


def _culprit(body: bytes, lines: bool) -> tuple[int, str | None]:
    """Return the index of the event that cannot be decoded, and its field."""
    if lines:
        parts: list[Any] = _raw_event.decode_lines(body)
    else:
        parts = _raw_events.decode(body) if body.lstrip().startswith(b"[") else [body]
    index = next(index for index, part in enumerate(parts) if _fails(part))
    with suppress(msgspec.ValidationError):  # no object at all
        return index, next((name for name, value in _raw_fields.decode(parts[index]).items() if _fails(value)), None)
    return index, None


def _fails(part: Any) -> bool:
    try:
        _decoder.decode(part)
    except msgspec.ValidationError:
        return True
    return False


def _not_utf8(body: bytes) -> int:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(body)


def _malformed(body: bytes, why: str, byte: int) -> Problem:
    line = body.count(b"\n", 0, byte) + 1
    column = byte - (body.rfind(b"\n", 0, byte) + 1) + 1
    text = f"The body is not JSON: {why}, at line {line}, column {column}."
    return Problem(400, "malformed", "Malformed JSON", text, position={"byte": byte, "line": line, "column": column})


_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode
# Not parsed yet, to find the part that fails.
_raw_event = msgspec.json.Decoder(msgspec.Raw)
_raw_events = msgspec.json.Decoder(list[msgspec.Raw])
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
encode = msgspec.json.Encoder(enc_hook=to_json).encode
"""JSON, also of times, decimals and bytes."""
