"""A stream that is opened at the place from which a frame reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeGuard

from weft.dataframes.layout import Layout
from weft.dataframes.options import Options, whole_number
from weft.errors import SettingsError
from weft.project import connect, current
from weft.streams.declare import Stream
from weft.systems.base import Connection, System, system_for, systems
from weft.systems.entries import Membership
from weft.systems.pages import PageFeed, Pages


def find_connection(url: str | Connection) -> Connection:
    """Return the connection that a URL, a name or a connection stands for."""
    return connect(url) if isinstance(url, str) and "://" in url else current().connection(url)


def system_with(capability: Literal["pages", "hashes"], connection: Connection, what: str) -> System:
    """Return the connection's system, which must be able to do this."""
    system = system_for(connection.kind)
    if getattr(system, capability) is None:
        able = [each.describes.partition(":")[0] for each in systems().values() if getattr(each, capability)]
        raise SettingsError(f"{what} needs {' or '.join(able)}; {connection.label} is {connection.kind}.")
    return system


def open_pages(connection: Connection, what: str) -> Pages:
    """Return what reads the system's own streams."""
    pages: Pages = system_with("pages", connection, what).load("pages")(connection)
    return pages


def open_feed(
    url: str | Connection,
    stream: str | bytes | Stream,
    options: Options,
    *,
    layout: Layout | None = None,
    iterates: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> PageFeed:
    """Open the stream at the place from which it is to be read. `layout` has fewer columns than that of the options."""
    layout = layout or options.layout
    connection, membership = find_connection(url), _membership(options)
    if is_declared(stream, connection):
        from weft.dataframes.log_feed import LogGroupFeed, LogRangeFeed

        if membership is None:
            return LogRangeFeed(connection, stream, layout, options.start_id, options.end_id)
        return LogGroupFeed(connection, stream, layout, membership)
    pages = open_pages(connection, "A key")
    if membership is None:
        return pages.read_range(stream, layout.field_names, options.start_id, options.end_id, stopped)
    return pages.read_group(
        stream, layout.field_names, membership, iterates=iterates, confirms=options.auto_ack, stopped=stopped
    )


def _membership(options: Options) -> Membership | None:
    group, consumer = options.group, options.consumer
    if group is None:
        for name, is_set in (
            ("consumer", consumer),
            ("auto_ack", options.auto_ack),
            ("claim_idle", options.claim_idle is not None),
        ):
            if is_set:
                raise SettingsError(f"{name} needs a group.", hint='group="analytics", consumer="worker-1"')
        if options.include_delivery:
            raise SettingsError("include_delivery needs a group.", hint="Only a group counts deliveries.")
        return None
    if not consumer:
        raise SettingsError(f"The group {group!r} needs a consumer.", hint='consumer="worker-1"')
    for what, name in (("group", group), ("consumer", consumer)):
        if not isinstance(name, str | bytes) or not name:
            raise SettingsError(f"{what} must be a name, not {name!r}.")
    if options.end_id != "+":
        raise SettingsError("A group has no end_id: it is given what no other member has.", hint="Leave one out.")
    if options.claim_idle is not None:
        whole_number("claim_idle", options.claim_idle)
    return Membership(
        group=group,
        consumer=consumer,
        group_start=options.start_id,
        auto_create=options.create_group,
        claim_idle=options.claim_idle,
        create_hint="create_group=True creates it, and starts it at start_id.",
    )


def is_declared(stream: object, connection: Connection) -> TypeGuard[str | Stream]:
    """Return whether this is a declared stream. Other names, which may be bytes, are those of the system's own
    streams."""
    has_own = system_for(connection.kind).pages is not None
    if isinstance(stream, bytes) and not has_own:
        raise SettingsError(f"A declared stream has a name, not {stream!r}.")
    named = isinstance(stream, str) and stream in current().streams
    return named or isinstance(stream, Stream) or not has_own
