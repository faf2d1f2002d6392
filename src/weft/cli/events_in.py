"""Events from a file, standard input or a text: JSON, NDJSON or CSV, one at a time, each with its line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import select
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, Self

from weft.cli.common import plural
from weft.errors import SchemaError, WeftError, nearest
from weft.types import FieldType, check_value, exact_number, from_json

if TYPE_CHECKING:
    from weft.streams import Stream

# A JSON array is read whole, to find where its events begin and end. NDJSON and CSV have no such limit.
MAX_JSON_BYTES = 256 * 1024 * 1024
# A longer line is no event: a single value may have 8 MiB. Also what an unclosed quote in a CSV file can take at most.
MAX_LINE_BYTES = 64 * 1024 * 1024
# When a pipe is silent for so long, what came before is published rather than held back for a full batch.
_PAUSE_SECONDS = 0.2

_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(slots=True)
class Record:
    """One event of the input, or what is wrong with it."""

    number: int
    line: int
    raw: str
    event: dict[str, Any] | None
    problem: str = ""
    """Begins with where it is: `, column 5: …`, `, field 'x' = 'y': …` or `: …`."""
    hint: str | None = None


class _BadRecordError(Exception):
    """Why a record cannot be parsed, in the form of `Record.problem`."""


_Raw = tuple[int, str, Any]


class EventInput:
    """The input of a publish. A context manager: leaving it closes the file."""

    def __init__(self, path: str | None, text: str | None = None, *, layout: str | None = None) -> None:
        """Open the file at `path`, or standard input for `-`. `text` is read in place of a file. `layout`: json, ndjson
        or csv."""
        self.name = "--data" if text is not None else "standard input" if path == "-" else str(path)
        self.size: int | None = None
        self.header: str = ""
        """The first line of a CSV file, which a file of its rejected lines begins with too."""
        self._path = path
        self._layout = "json" if text is not None else layout
        self._lines_read = 0
        self.note: Callable[[str], object] = lambda text: None
        """Called with a note about the input for the user."""
        self.pausing: Callable[[], object] = lambda: None
        """Called when no line came for a while: the next event may take long."""
        self._file: IO[bytes]
        if text is not None:
            self._file = io.BytesIO(text.encode("utf-8", "surrogatepass"))
        else:
            self._file = sys.stdin.buffer if path == "-" else open(str(path), "rb")  # noqa: SIM115
        state = _stat(self._file)
        if state is not None and stat.S_ISREG(state.st_mode):
            self.size = state.st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path != "-":
            self._file.close()

    def position(self) -> int:
        """Return how many bytes of the file were read; of a compressed one, compressed bytes."""
        return self._file.tell() if self.size is not None else 0

    def records(self, stream: Stream, skip: int, columns: Callable[[], Mapping[str, FieldType]]) -> Iterator[Record]:
        """Yield the events after the first `skip`. Values of CSV are parsed by the types of the stream's fields, bytes
        and decimals of JSON by those of its `columns`, which may be more."""
        read: Callable[[Iterator[bytes], Stream], Iterator[_Raw]]
        decode: Callable[[Any, str, Callable[[], Mapping[str, FieldType]]], dict[str, Any]]
        try:
            layout, lines = self._sniffed(stream)
            if layout == "csv":
                read, decode, columns = self._read_csv, _event_of_row, lambda: stream.fields
            elif layout == "ndjson":
                read, decode = self._read_ndjson, _event_of_line
            else:
                read, decode = self._read_json, _event_of_value
            for number, (line, raw, payload) in enumerate(read(lines, stream), 1):
                if number <= skip:
                    continue
                try:
                    yield Record(number, line, raw, decode(payload, raw, columns))
                except _BadRecordError as problem:
                    yield Record(number, line, raw, None, str(problem))
        except (OSError, EOFError, zlib.error) as error:
            if isinstance(error, WeftError):  # of a publish in a pause
                raise
            raise SchemaError(f"{self.name} cannot be read after line {self._lines_read:,}: {error}.") from None

    def _fail(self, line: int, problem: str, hint: str | None = None) -> SchemaError:
        return SchemaError(f"{self.name}, line {line:,}{problem}.", hint=hint)

    # ---------------------------------------------------------- lines

    def _sniffed(self, stream: Stream) -> tuple[str, Iterator[bytes]]:
        """Return the layout, by the file's ending or its first line, and all lines."""
        lines = self._lines()
        name = self.name.lower().removesuffix(".gz")
        layout = self._layout or {"csv": "csv", "ndjson": "ndjson", "jsonl": "ndjson"}.get(name.rpartition(".")[2])
        if layout is not None:
            return layout, lines
        first: list[bytes] = []
        for line in lines:
            first.append(line)
            if line.strip(b" \t\r\n\xef\xbb\xbf"):
                break
        layout = _layout_of(first[-1] if first else b"", stream.fields)
        if layout is None:
            named = f", nor does it name a field of {stream.name} ({_listed(stream.fields)}) as CSV would"
            raise self._fail(
                len(first),
                f": it is no JSON{named if stream.fields else ''}",
                hint="If it is CSV, say so with --input csv.",
            )
        return layout, chain(first, lines)

    def _lines(self) -> Iterator[bytes]:
        if self._path is not None and self._path.endswith(".gz"):
            lines = _lines_of(gzip.GzipFile(fileobj=self._file))
        elif self.size is None and _stat(self._file) is not None:
            lines = self._live_lines(self._file.fileno())
        else:
            lines = _lines_of(self._file)
        for self._lines_read, line in enumerate(lines, 1):
            if len(line) > MAX_LINE_BYTES:
                raise self._fail(self._lines_read, f" is longer than {MAX_LINE_BYTES >> 20} MiB")
            yield line.removeprefix(b"\xef\xbb\xbf") if self._lines_read == 1 else line

    def _live_lines(self, file: int) -> Iterator[bytes]:
        """Yield the lines of a pipe or terminal as they come. Python's buffer is not used: it hides whether more is
        there."""
        parts: list[bytes] = []
        while True:
            if not select.select([file], [], [], _PAUSE_SECONDS)[0]:
                self.pausing()
            chunk = os.read(file, 1 << 20)
            if not chunk:
                break
            first, newline, rest = chunk.partition(b"\n")
            parts.append(first + newline)
            if newline:
                yield b"".join(parts)
                *lines, last = rest.split(b"\n")
                yield from (line + b"\n" for line in lines)
                parts = [last]
            elif sum(map(len, parts)) > MAX_LINE_BYTES:
                break
        if any(parts):
            yield b"".join(parts)

    # ---------------------------------------------------------- layouts

    def _read_ndjson(self, lines: Iterator[bytes], _: Stream) -> Iterator[_Raw]:
        for line, content in enumerate(lines, 1):
            content = content.strip()
            if content:
                yield line, content.decode("utf-8", "replace"), content

    def _read_json(self, lines: Iterator[bytes], _: Stream) -> Iterator[_Raw]:
        """An object or an array of objects, or several of either."""
        parts, size = [], 0
        for content in lines:
            parts.append(content)
            size += len(content)
            if size > MAX_JSON_BYTES:
                raise SchemaError(
                    f"{self.name} is longer than {MAX_JSON_BYTES >> 20} MiB, which is as much JSON as is read at once.",
                    hint="Write one event a line (jq -c '.[]'), which may be of any length: --input ndjson.",
                )
        try:
            text = b"".join(parts).decode()
        except UnicodeDecodeError as error:
            raise self._fail(error.object.count(b"\n", 0, error.start) + 1, f": {_not_utf8(error)}") from None
        parts.clear()
        at, line, counted, in_array = _skip(text, 0), 1, 0, False
        while at < len(text):
            if not in_array and text[at] == "[":
                in_array, at = True, _skip(text, at + 1)
                if text[at : at + 1] == "]":
                    in_array, at = False, _skip(text, at + 1)
                continue
            line, counted = line + text.count("\n", counted, at), at
            try:
                value, end = _decode_json.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                where = error.lineno if isinstance(error, json.JSONDecodeError) else line
                raise self._fail(where, _json_problem(error)) from None
            yield line, text[at:end], value
            at = _skip(text, end)
            if in_array:
                follows = text[at : at + 1]
                if follows not in (",", "]"):
                    column = at - text.rfind("\n", 0, at)
                    raise self._fail(
                        text.count("\n", 0, at) + 1, f", column {column}: Expecting ',' or ']' after an event"
                    )
                in_array, at = follows == ",", _skip(text, at + 1)
        if in_array:
            raise self._fail(text.count("\n") + 1, ": the list has no end")

    def _read_csv(self, lines: Iterator[bytes], stream: Stream) -> Iterator[_Raw]:
        csv.field_size_limit(MAX_LINE_BYTES)
        held: list[str] = []

        def texts() -> Iterator[str]:
            for line in lines:
                held.append(line.decode("utf-8", "surrogateescape"))
                yield held[-1]

        rows = csv.reader(texts(), strict=True)
        header: list[str] | None = None
        line = 1
        while True:
            held.clear()
            try:
                row: list[str] | csv.Error = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                row = error
            begins, line = line, rows.line_num + 1
            if header is None:
                if isinstance(row, csv.Error):
                    raise self._fail(begins, f": {row}")
                if row:
                    header, self.header = self._checked_header(begins, row, stream), "".join(held)
            elif row:
                yield begins, "".join(held), (header, row)

    def _checked_header(self, line: int, row: list[str], stream: Stream) -> list[str]:
        header = [name.strip() for name in row]
        for index, name in enumerate(header):
            if not name or name in header[:index]:
                problem = f"two columns are named {name!r}" if name else f"column {index + 1} has no name"
                raise self._fail(line, f": {problem}", hint="The first line of a CSV file names the fields.")
        fields = stream.fields
        if fields and not fields.keys() & header:
            raise SchemaError(
                f"{self.name}: none of its columns is a field of {stream.name} ({_listed(fields)}). "
                "Is the delimiter a comma?",
                hint="The first line of a CSV file names the fields.",
            )
        for name in header if fields else ():
            close = nearest(name.lower(), {field.lower(): field for field in fields})
            if name not in fields and close is not None:
                meant = next(field for field in fields if field.lower() == close)
                self.note(
                    f"note: {self.name}: the column {name!r} is no field of {stream.name}. Did you mean {meant!r}?"
                )
        return header


def _stat(file: IO[bytes]) -> os.stat_result | None:
    try:
        return os.fstat(file.fileno())
    except OSError:  # not a file of the system's: --data, or a test's standard input
        return None


def _lines_of(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    return iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")


def _listed(fields: Iterable[str]) -> str:
    names = list(fields)
    return ", ".join(names[:10]) + ", …" * (len(names) > 10)


def _layout_of(line: bytes, fields: Mapping[str, FieldType]) -> str | None:
    content = line.strip(b" \t\r\n\xef\xbb\xbf")
    if content[:1] == b"{":
        # A whole object on its first line is followed by others; one that goes on below is alone or in a list.
        try:
            json.loads(content)
        except ValueError:
            return "ndjson" if content[-1:] == b"}" else "json"
        return "ndjson"
    if content[:1] in (b"[", b""):
        return "json"
    try:
        header = next(csv.reader([content.decode("utf-8", "replace")]))
    except csv.Error:
        return None
    return "csv" if fields.keys() & {name.strip() for name in header} else None


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


# ---------------------------------------------------------- values


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    event = dict(pairs)
    if len(event) < len(pairs):
        keys: set[str] = set()
        repeated = next(key for key, _ in pairs if key in keys or keys.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated!r} is there twice, and it is not known which value is meant")
    return event


_decode_json = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)


def _json_problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f", column {error.colno}: {error.msg}"
    return f": {'it is nested too deeply' if isinstance(error, RecursionError) else error}"


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"it is not UTF-8: byte 0x{error.object[error.start]:02x}"


def _event_of_line(content: bytes, raw: str, columns: Callable[[], Mapping[str, FieldType]]) -> dict[str, Any]:
    try:
        return _event_of_value(_decode_json.decode(content.decode()), raw, columns)
    except UnicodeDecodeError as error:
        raise _BadRecordError(f", column {error.start + 1}: {_not_utf8(error)}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, WeftError):  # of the stream, when its columns are looked up: no event is to blame
            raise
        raise _BadRecordError(_json_problem(error)) from None


def _event_of_value(value: Any, raw: str, columns: Callable[[], Mapping[str, FieldType]]) -> dict[str, Any]:
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
        raise _BadRecordError(f": an event must be a JSON object, not {kinds.get(type(value), 'a number')}")
    for name, kind in columns().items():
        item = value.get(name)
        if kind.base == "bytes" and item is not None:
            with suppress(ValueError):  # the stream decides about another text
                value[name] = from_json(item, kind)
        elif kind.base == "decimal" and type(item) is float:
            value[name] = exact_number(item, json.loads(raw, parse_float=str)[name])
    return value


def _event_of_row(
    payload: tuple[list[str], list[str] | csv.Error], raw: str, columns: Callable[[], Mapping[str, FieldType]]
) -> dict[str, Any]:
    header, row = payload
    if isinstance(row, csv.Error):
        raise _BadRecordError(f": {row}")
    if len(row) != len(header):
        raise _BadRecordError(f": {plural(len(row), 'value')} for the header's {plural(len(header), 'field')}")
    event: dict[str, Any] = dict.fromkeys(header)
    for name, text in zip(header, row, strict=True):
        if not text:
            continue
        if not text.isascii() and re.search("[\udc80-\udcff]", text):
            raise _BadRecordError(f", field {name!r} = {text[:80]!a}: it is not UTF-8")
        kind = columns().get(name)
        parse = _PARSERS.get(kind.base) if kind is not None else None
        event[name] = text if parse is None or kind is None else _converted(name, text, kind, parse)
    return event


def value_of(text: str, kind: FieldType) -> Any:
    """Parse a text as the value of a field of that type, or raise `ValueError`."""
    parse = _PARSERS.get(kind.base)
    value = text if parse is None else parse(text, kind)
    return value if kind.base == "json" else check_value(value, kind)


def _converted(name: str, text: Any, kind: FieldType, parse: Callable[[Any, FieldType], object]) -> object:
    try:
        return parse(text, kind)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        shown = repr(text) if len(repr(text)) <= 80 else f"{repr(text)[:77]}…"
        raise _BadRecordError(f", field {name!r} = {shown}: it must be {kind}, but {why}") from None


def _bool(text: str, _: FieldType) -> bool:
    value = _BOOLEANS.get(text.strip().lower())
    if value is None:
        raise ValueError("it is not true or false")
    return value


def _int(text: str, _: FieldType) -> int:
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,4000}\s*", text):
        raise ValueError("it is not a whole number")
    return int(text)


def _float(text: str, _: FieldType) -> float:
    with suppress(ValueError):
        if "_" not in text:
            return float(text)
    raise ValueError("it is not a number")


def _json(text: str, _: FieldType) -> object:
    try:
        return _decode_json.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos + 1}") from None


_BOOLEANS = {"true": True, "t": True, "yes": True, "1": True, "false": False, "f": False, "no": False, "0": False}
# The stream itself parses the texts of other types.
_PARSERS: dict[str, Callable[[Any, FieldType], object]] = {
    "bool": _bool,
    "int32": _int,
    "int64": _int,
    "float32": _float,
    "float64": _float,
    "json": _json,
    "bytes": from_json,
}
