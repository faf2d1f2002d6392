"""How files are written and read: the options of each format, checked when they are declared."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from weft.errors import DeclarationError, did_you_mean
from weft.spark_support.sessions import TIME_FORMATS
from weft.systems.base import Settings
from weft.systems.objects.formats import FORMATS

COMPRESSIONS = ("snappy", "gzip", "zstd", "uncompressed")


@dataclass(frozen=True, kw_only=True)
class FormatFields:
    """The format of files and the options of that format, as users write them."""

    format: str | None = None
    parquet_compression: str | None = None
    csv_delimiter: str | int | None = None
    csv_header: bool | None = None
    csv_quote: str | int | None = None
    csv_escape: str | int | None = None
    csv_null_value: str | None = None
    csv_read_options: dict[str, Any] | None = None
    json_read_options: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class FileOptions(FormatFields):
    """How a file is written and read. A read option that is left out has the value of the write option of its name."""

    format: str = "parquet"

    @classmethod
    def declare(cls, format: str | None = None, **options: Any) -> Self:
        """Options as a user wrote them, or `DeclarationError` for an option or a value that cannot be."""
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                hint = did_you_mean(name, known, f"Its options: {', '.join(known)}.")
                raise DeclarationError(f"Files have no option {name!r}.", hint=hint)
        if format is not None and format not in FORMATS:
            hints = (did_you_mean(str(format), FORMATS), f"Formats: {', '.join(FORMATS)}.")
            raise DeclarationError(f"There is no file format {format!r}.", hint=" ".join(filter(None, hints)))
        chosen = format or "parquet"
        checked: dict[str, Any] = {}
        for name, value in options.items():
            if value is None:
                continue
            owner = format_of_option(name)
            if owner != chosen:
                raise DeclarationError(
                    f"{name} is an option of {owner} files; these are {chosen}.",
                    hint=f'Leave it out, or set format="{owner}".',
                )
            checked[name] = _CHECKS[name](name, value)
        declared = cls(format=chosen, **checked)
        if chosen == "csv":
            declared._refuse_ambiguous()
        return declared

    def _refuse_ambiguous(self) -> None:
        """Raise for two options with the same character: a file could not be parsed."""
        writer = self.spark_writer()
        written = {"csv_delimiter": writer["sep"], "csv_quote": writer["quote"]}
        if self.csv_escape is not None and self.csv_escape != writer["quote"]:
            written["csv_escape"] = self.csv_escape
        read: dict[str, Any] = {
            name: self.read[name] for name in ("delimiter", "quote", "comment") if name in self.read
        }
        if self.read.get("escape", read["quote"]) != read["quote"]:
            read["escape"] = self.read["escape"]
        for where, characters in (("", written), ("csv_read_options: ", read)):
            for name, value in characters.items():
                same = next(each for each in characters if characters[each] == value)
                if same != name:
                    raise DeclarationError(
                        f"{where}{same} and {name} are both {value!r}.", hint="Give one of them another character."
                    )
        bad = set(self.csv_null_value or "") & {*written.values(), "\r", "\n"} - {self.csv_escape}
        if bad:
            raise DeclarationError(
                f"csv_null_value cannot hold {min(bad)!r}, which means something else in these files.",
                hint='For example "\\\\N" or "NULL".',
            )

    def with_format(self, format: str) -> FileOptions:
        """Return the options for files of another format, without those of this one."""
        return self if format == self.format else FileOptions(format=format)

    @property
    def read(self) -> dict[str, Any]:
        """The CSV or JSON read options, with what the write options say for those that are left out."""
        if self.format == "json_lines":
            return dict(self.json_read_options or {})
        written = {
            "has_header": self.csv_header,
            "delimiter": self.csv_delimiter,
            "quote": self.csv_quote,
            "escape": self.csv_escape,
        }
        defaults = {name: value for name, value in written.items() if value is not None}
        return {"has_header": True, "delimiter": ",", "quote": '"', **defaults, **(self.csv_read_options or {})}

    def spark_writer(self) -> dict[str, Any]:
        """Return the options of Spark's writer."""
        if self.format == "parquet":
            return {"compression": self.parquet_compression or "snappy"}
        if self.format == "json_lines":
            # Every row has every key: a reader that looks at the first rows only must see all columns.
            return {**TIME_FORMATS, "ignoreNullFields": False}
        if self.format == "csv":
            quote = self.csv_quote or '"'
            return {
                **TIME_FORMATS,
                "sep": self.csv_delimiter or ",",
                "header": True if self.csv_header is None else self.csv_header,
                "quote": quote,
                "escape": self.csv_escape or quote,
                "nullValue": self.csv_null_value or "",
                # Quoted, so that an empty text differs from a null.
                "emptyValue": quote * 2,
                # Spark would cut off blanks.
                "ignoreLeadingWhiteSpace": False,
                "ignoreTrailingWhiteSpace": False,
            }
        return {}

    def dialect(self) -> dict[str, Any]:
        """Return the options that are needed to read the files again."""
        writer = self.spark_writer()
        return {name: writer[name] for name in ("sep", "header", "quote", "escape", "nullValue") if name in writer}

    def spark_reader(self) -> dict[str, Any]:
        """Return the options of Spark's reader, which knows neither `null_regex` nor a limit of inference in rows."""
        if self.format == "json_lines":
            return {"mode": "FAILFAST"}
        if self.format != "csv":
            return {}
        read = self.read
        options = {
            "sep": read["delimiter"],
            "header": read["has_header"],
            "quote": read["quote"],
            "escape": read.get("escape", read["quote"]),
            "nullValue": self.csv_null_value or "",
            "emptyValue": "",
            "ignoreLeadingWhiteSpace": False,
            "ignoreTrailingWhiteSpace": False,
            # A quoted value may hold line breaks; by lines it would become two broken rows.
            "multiLine": True,
            # Spark's default fills a row with too few values with nulls, and cuts one with too many.
            "mode": "FAILFAST",
        }
        if "comment" in read:
            options["comment"] = read["comment"]
        return options


def format_of_option(name: str) -> str:
    """Return the format whose files an option is about."""
    return {"parquet": "parquet", "csv": "csv", "json": "json_lines"}[name.partition("_")[0]]


def _character(name: str, value: object) -> str:
    """Return one ASCII character; also its number, as TOML files of other tools give it."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 128:
        value = chr(value)
    if not isinstance(value, str) or len(value) != 1 or not value.isascii() or value in "\0\r\n":
        raise DeclarationError(f"{name} must be a single ASCII character, not {value!r}.")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise DeclarationError(f"{name} must be true or false, not {value!r}.")
    return value


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise DeclarationError(f"{name} must be a whole number of at least 1, not {value!r}.")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise DeclarationError(f"{name} must be a text, not {type(value).__name__}.")
    return value


def _compression(name: str, value: object) -> str:
    if value not in COMPRESSIONS:
        hints = (did_you_mean(str(value), COMPRESSIONS), f"It is one of: {', '.join(COMPRESSIONS)}.")
        raise DeclarationError(f"{name} cannot be {value!r}.", hint=" ".join(filter(None, hints)))
    return str(value)


def _pattern(name: str, value: object) -> str:
    text = _text(name, value)
    try:
        re.compile(text)
    except re.error as error:
        raise DeclarationError(f"{name} is not a regular expression: {error}.") from None
    return text


def _table(checks: Mapping[str, Callable[[str, object], Any]]) -> Callable[[str, object], Settings]:
    def check(name: str, value: object) -> Settings:
        if not isinstance(value, Mapping):
            raise DeclarationError(f"{name} must be a table of options, not {type(value).__name__}.")
        checked = Settings()
        for key, each in value.items():
            if key not in checks:
                hint = did_you_mean(str(key), checks, f"Its options: {', '.join(checks)}.")
                raise DeclarationError(f"{name} has no option {key!r}.", hint=hint)
            if each is not None:
                checked[key] = checks[key](f"{name}[{key!r}]", each)
        return checked

    return check


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "parquet_compression": _compression,
    "csv_delimiter": _character,
    "csv_header": _flag,
    "csv_quote": _character,
    "csv_escape": _character,
    "csv_null_value": _text,
    "csv_read_options": _table(
        {
            "has_header": _flag,
            "delimiter": _character,
            "quote": _character,
            "escape": _character,
            "comment": _character,
            "null_regex": _pattern,
            "truncated_rows_ok": _flag,
            "schema_infer_max_records": _count,
        }
    ),
    # Spark decodes row by row, so that a batch's size changes nothing; it is taken because the guide's users set it.
    "json_read_options": _table({"schema_infer_max_records": _count, "batch_size": _count}),
}
