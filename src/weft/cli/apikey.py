"""`weft apikey create | list | revoke`: who may use the service."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import UNITS, common_options, parse_time, print_json, print_table, time_text
from weft.cli.serve import needs_server
from weft.errors import unknown
from weft.project import current

if TYPE_CHECKING:
    from weft.server.keys import ApiKey, KeyTable


class _Expiry(click.ParamType[datetime]):
    """A time to come, or how long from now."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        span = re.fullmatch(r"(\d{1,5}) ?([hd])", str(value))
        now = datetime.now(UTC)
        try:
            end = now + int(span[1]) * UNITS[span[2]] if span else parse_time(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a time such as 2027-01-31, or 90d or 12h from now.", param, ctx)
        if end <= now:
            self.fail(f"{value!r} is past.", param, ctx)
        return end


@click.group()
def apikey() -> None:
    """Create, list and revoke keys of the service.

    Once a key was created, every stream that has no credential of its own needs one, also when all were revoked since.
    """


@contextmanager
def _keys() -> Iterator[KeyTable]:
    """The table of keys. Its connection may be one that the project's modules register."""
    with needs_server():
        from weft.server.keys import key_table
    with key_table() as table:
        yield table


@apikey.command()
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice(["read", "write", "admin"]),
    help="read: list, look, subscribe, consume, ack. write: publish. admin: everything. May be repeated.",
)
@click.option("--stream", "streams", multiple=True, metavar="NAME", help="Only for this stream. May be repeated.")
@click.option("--name", metavar="TEXT", help="What it is for, to find it in the list.")
@click.option("--expires", type=_Expiry(), metavar="TIME", help="When it ends: 2027-01-31, or 90d or 12h from now.")
@click.option("--rate", type=click.FloatRange(0.001, 1e9), metavar="N", help="At most N requests a second.")
@click.option("--burst", type=click.IntRange(1, 10**9), metavar="N", help="So many at once; with --rate.")
@common_options
def create(
    scopes: tuple[str, ...],
    streams: tuple[str, ...],
    name: str | None,
    expires: datetime | None,
    rate: float | None,
    burst: int | None,
    output: str,
) -> None:
    """Make a key, and show it: this once, since only a hash of it is kept."""
    if burst is not None and rate is None:
        raise click.UsageError("--burst goes with --rate.")
    with _keys() as table:
        from weft.server.rates import Rate

        known = current().streams
        for stream in streams:
            if stream not in known:
                raise unknown("stream", stream, known, otherwise="Import the module that declares it with --module.")
        is_first = not table.all()
        limit = None if rate is None else Rate(rate, burst or max(1.0, rate))
        key, token = table.create(
            name=name,
            scopes=scopes,  # type: ignore[arg-type]
            streams=streams,
            expires_at=expires,
            rate=limit,
        )
    if output == "json":
        print_json({**_shown(key), "key": token})
        return
    click.echo(token)
    until = "" if key.expires_at is None else f", until {time_text(key.expires_at)}"
    good_for = f"{' and '.join(key.scopes)} of {', '.join(key.streams) or 'all streams'}{until}"
    click.echo(f"The key {key.id}, good for {good_for}. It is not shown again.", err=True)
    click.echo("Send it as the header: Authorization: Bearer KEY", err=True)
    if is_first:
        click.echo("It is the first one: from now on streams that were open need a key.", err=True)


@apikey.command("list")
@common_options
def list_(output: str) -> None:
    """List all keys that were ever created, without their secrets."""
    with _keys() as table:
        keys = list(table.all().values())
    if output == "json":
        print_json([_shown(key) for key in keys])
        return
    if not keys:
        click.echo(
            "No key was created yet, so none is needed. Create one with: weft apikey create --scope admin", err=True
        )
        return
    rows = [
        {
            "id": key.id,
            "name": key.name,
            "scopes": key.scopes,
            "streams": key.streams or "all",
            "rate": None if key.rate is None else f"{key.rate.per_second:g}/s, {key.rate.burst:g} at once",
            "created": time_text(key.created_at),
            "expires": time_text(key.expires_at),
            "state": key.ended or "good",
        }
        for key in keys
    ]
    columns = ["id", "name", "scopes", "streams", "rate", "created", "expires", "state"]
    print_table(rows, columns, spare=["created", "rate", "expires"])


@apikey.command()
@click.argument("key_id", metavar="ID")
@common_options
def revoke(key_id: str, output: str) -> None:
    """End the key ID for good. Running services know within five seconds."""
    with _keys() as table:
        key = table.revoke(key_id)
    if output == "json":
        print_json(_shown(key))
        return
    click.echo(f"The key {key.id} was revoked at {time_text(key.revoked_at)}. Services know within five seconds.")


def _shown(key: ApiKey) -> dict[str, Any]:
    shown = asdict(key)
    del shown["secret_hash"], shown["rate"]
    per_second, burst = key.rate or (None, None)
    return {**shown, "requests_per_second": per_second, "burst": burst, "ended": key.ended}
