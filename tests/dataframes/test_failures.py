"""Servers that die, forget, move; users, TLS and clusters: no entry is missed, and none is acknowledged unseen."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis

import redis_server
import servers
import warm_python
import weft
from consumers.protected import behind_tls, wait_for_replica, watched
from weft.errors import ConnectionFailedError, StorageError

GROUP: dict[str, Any] = {"group": "g", "consumer": "c"}


def fill(client: Any, numbers: range, stream: str = "events") -> list[str]:
    pipeline = client.pipeline(transaction=False)
    for n in numbers:
        pipeline.xadd(stream, {"n": n})
    return [each.decode() for each in pipeline.execute()]


@pytest.mark.timing
@pytest.mark.parametrize("member", [{}, {**GROUP, "auto_ack": True}], ids=["range", "group"])
def test_a_server_that_is_killed_and_comes_back(own_server: redis_server.RedisServer, member: dict[str, Any]) -> None:
    with closing(own_server.connect()) as client:
        fill(client, range(500))
    seen: list[int] = []
    with weft.iter_stream(own_server.url(), "events", batch_size=100, schema={"n": pl.Int64}, **member) as batches:
        for frame in batches:
            seen += frame["n"].to_list()
            if len(seen) == 300:
                own_server.kill()
                back = threading.Timer(0.5, own_server.start)
                back.start()
            if len(seen) == 500:
                with closing(own_server.connect()) as client:
                    fill(client, range(500, 600))
            if len(seen) == 600:
                break
    back.join()
    assert seen == list(range(600))
    if member:
        with closing(own_server.connect()) as client:
            assert client.xpending("events", "g")["pending"] == 0


def test_a_reply_that_is_lost_is_delivered_again(url: str, client: Any) -> None:
    """The connection breaks after Redis has noted that the entries are this consumer's."""
    ids = fill(client, range(20))
    seen: list[str] = []
    with weft.iter_stream(url, "events", batch_size=5, **GROUP) as batches:
        seen += next(batches)["_id"].to_list()
        wire = batches._feed.wire  # type: ignore[attr-defined]
        wire.send("XREADGROUP", "GROUP", "g", "c", "COUNT", 5, "STREAMS", "events", ">")
        servers.wait_until(lambda: client.xpending("events", "g")["pending"] == 10, "the entries to be delivered")
        wire._sent = None
        wire._socket().close()
        while len(seen) < 20:
            seen += next(batches)["_id"].to_list()
    assert seen == ids


@pytest.mark.parametrize("lost", [b"SCAN", b"XRANGE"])
def test_many_streams_over_a_connection_that_breaks(url: str, client: Any, cutter: Any, lost: bytes) -> None:
    for number in range(3):
        fill(client, range(3), f"events:{number}")
    cutter.cut = lost
    assert len(weft.read_streams(cutter.url, "events:*")) == 9
    assert cutter.cuts == 1


def test_hashes_over_a_connection_that_breaks(url: str, client: Any, cutter: Any) -> None:
    cutter.cut, cutter.passes = b"HSET", 1
    frame = pl.DataFrame({"key": [f"k{n}" for n in range(2500)], "n": list(range(2500))})
    assert weft.write_hashes(cutter.url, frame) == 2500
    assert cutter.cuts == 1
    assert client.dbsize() == 2500


def test_acknowledgements_that_were_lost_are_sent_again(url: str, client: Any) -> None:
    ids = fill(client, range(20))
    with weft.iter_stream(url, "events", batch_size=10, auto_ack=True, **GROUP) as batches:
        next(batches)
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert next(batches)["_id"].to_list() == ids[10:]
    assert client.xpending("events", "g")["pending"] == 0


def test_acknowledgements_that_a_server_refuses_for_a_while(own_server: redis_server.RedisServer) -> None:
    with closing(own_server.connect()) as client:
        ids = fill(client, range(10))
        batches = weft.iter_stream(own_server.url(), "events", auto_ack=True, **GROUP)
        frame_ids = batches.take()["_id"].to_pylist()  # type: ignore[index]
        client.config_set("min-replicas-to-write", 1)
        batches._feed.confirm()
        with pytest.raises(StorageError, match="NOREPLICAS"):
            batches._feed.settle()
        assert client.xpending("events", "g")["pending"] == len(frame_ids) == len(ids)
        batches.close()


@pytest.mark.timing
def test_acknowledgements_that_a_server_cannot_store_any_more(
    own_server: redis_server.RedisServer, later: Callable[..., None]
) -> None:
    """It became a replica, to which nothing is written. Its answer is not that there is nothing to acknowledge."""
    with closing(own_server.connect()) as client:
        fill(client, range(10))
        batches = weft.iter_stream(own_server.url(), "events", auto_ack=True, **GROUP)
        batches.take()
        client.execute_command("REPLICAOF", "127.0.0.1", servers.free_port())
        batches._feed.confirm()
        later(client.execute_command, "REPLICAOF", "NO", "ONE")
        batches._feed.settle()
        assert client.xpending("events", "g")["pending"] == 0
        batches.close()


@pytest.mark.timing
def test_acknowledgements_without_a_connection(
    own_server: redis_server.RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """They are sent with the next one; where there is none, the log says so."""
    with closing(own_server.connect()) as client:
        fill(client, range(10))
    batches = weft.iter_stream(own_server.url(), "events", batch_size=5, auto_ack=True, **GROUP)
    feed = batches._feed
    batches.take()
    feed.wire._drop()  # type: ignore[attr-defined]
    feed.confirm()
    batches.take()
    feed.settle()
    with closing(own_server.connect()) as client:
        assert client.xpending("events", "g")["pending"] == 5
    feed.confirm()
    own_server.kill()
    batches.close()
    assert "1 acknowledgements about 'events' did not reach Redis" in caplog.text


def test_a_forked_process_leaves_the_connection_alone(url: str, client: Any) -> None:
    ids = fill(client, range(300))
    program = FORK.format(url=url)
    done = warm_python.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ids
    assert client.xpending("events", "g")["pending"] == 0


FORK = """
import os, sys, weft
seen = []
options = dict(group="g", consumer="c", batch_size=100, auto_ack=True, count=300)
with weft.iter_stream("{url}", "events", **options) as batches:
    for frame in batches:
        seen += frame["_id"].to_list()
        if os.fork() == 0:
            sys.exit(0)  # and all that this process had is cleared away
        os.wait()
print(*seen)
"""


@pytest.mark.parametrize("how", ["delete", "flush", "destroy"])
def test_a_group_that_vanishes(url: str, client: Any, how: str, caplog: pytest.LogCaptureFixture) -> None:
    fill(client, range(10))
    with weft.iter_stream(url, "events", batch_size=10, block_ms=10, auto_ack=True, **GROUP) as batches:
        assert len(next(batches)) == 10
        {"delete": lambda: client.delete("events"), "flush": client.flushdb}.get(
            how, lambda: client.xgroup_destroy("events", "g")
        )()
        if how == "destroy":
            assert len(next(batches)) == 10  # it starts again where it was told to
        new = fill(client, range(5))
        assert next(batches)["_id"].to_list() == new
    assert "The group 'g' of 'events' was gone" in caplog.text


def test_a_group_that_is_set_back(url: str, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Or destroyed, and created by somebody else."""
    ids = fill(client, range(10))
    with weft.iter_stream(url, "events", batch_size=10, auto_ack=True, **GROUP) as batches:
        next(batches)
        client.xgroup_setid("events", "g", "0")
        assert next(batches)["_id"].to_list() == ids
    assert f"was set back: it begins again at {ids[0]}" in caplog.text


@pytest.mark.parametrize("again", [False, True], ids=["gone", "created again"])
def test_a_group_that_vanishes_between_reads(
    url: str, client: Any, caplog: pytest.LogCaptureFixture, again: bool
) -> None:
    ids = fill(client, range(10))
    assert len(weft.read_stream(url, "events", auto_ack=True, **GROUP)) == 10
    assert len(weft.read_stream(url, "events", auto_ack=True, **GROUP)) == 0
    assert "begins again" not in caplog.text
    client.xgroup_destroy("events", "g")
    if again:
        client.xgroup_create("events", "g", "0")
    assert weft.read_stream(url, "events", auto_ack=True, **GROUP)["_id"].to_list() == ids
    assert "begins again after 0-0" in caplog.text


@pytest.mark.timing
def test_a_group_that_vanishes_while_it_waits(url: str, client: Any, later: Callable[..., None]) -> None:
    fill(client, range(10))

    def replace() -> None:
        client.delete("events")
        fill(client, range(10, 13))

    with weft.iter_stream(url, "events", block_ms=0, schema={"n": pl.Int64}, **GROUP) as batches:
        next(batches)
        later(replace)
        seen: list[int] = []
        while len(seen) < 3:
            seen += next(batches)["n"].to_list()
        assert seen == [10, 11, 12]


@pytest.mark.timing
def test_a_server_that_stays_away(own_server: redis_server.RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.systems.redis import group_member

    monkeypatch.setattr(group_member, "PATIENCE_SECONDS", 0.3)
    with closing(own_server.connect()) as client:
        fill(client, range(10))
    batches = weft.iter_stream(own_server.url(), "events")
    next(batches)
    own_server.kill()
    with pytest.raises(ConnectionFailedError):
        next(batches)


@pytest.mark.timing
def test_told_to_stop_while_the_server_is_away(own_server: redis_server.RedisServer) -> None:
    with closing(own_server.connect()) as client:
        fill(client, range(10))
    stop = threading.Event()
    batches = weft.iter_stream(own_server.url(), "events", stop=stop)
    next(batches)
    own_server.kill()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    assert list(batches) == []
    timer.join()


def test_users_and_passwords(url: str, client: Any) -> None:
    fill(client, range(3))
    client.execute_command("ACL", "SETUSER", "reader", "on", ">p%40ss/word", "~*", "+@all")
    try:
        host = url.partition("://")[2]
        frame = weft.read_stream(f"redis://reader:p%2540ss%2Fword@{host}", "events")
        assert len(frame) == 3
        for ask in (weft.read_stream, weft.read_streams):
            with pytest.raises(ConnectionFailedError, match="user, password") as refused:
                ask(f"redis://reader:wrong-secret@{host}", "events")
            assert "wrong-secret" not in str(refused.value)
    finally:
        client.execute_command("ACL", "DELUSER", "reader")


@pytest.mark.full
def test_tls(need_server: Callable[[str], None], tmp_path: Path) -> None:
    need_server("redis")
    with behind_tls(tmp_path) as (server, url, authority):
        with closing(server.connect()) as client:
            ids = fill(client, range(30_000))
        known = f"{url}/?tls_ca={authority}"
        assert weft.read_stream(known, "events")["_id"].to_list() == ids
        with weft.iter_stream(known, "events", batch_size=10_000, auto_ack=True, **GROUP) as batches:
            assert [len(next(batches)) for _ in range(3)] == [10_000] * 3
        with pytest.raises(ConnectionFailedError):
            weft.read_stream(url, "events")


# ------------------------------------------------------------------------------------------------------------- cluster


def test_streams_on_every_node_of_a_cluster(cluster: str, shared_server: Callable[[str], Any]) -> None:
    with closing(shared_server("redis-cluster").connect()) as client:
        names = [f"events:{i}" for i in range(12)]
        assert len({client.get_node_from_key(name).name for name in names}) == 3
        ids = {name: [client.xadd(name, {"n": i}).decode() for i in range(20)] for name in names}
        for name in names:
            assert weft.read_stream(cluster, name)["_id"].to_list() == ids[name]
            with weft.iter_stream(cluster, name, batch_size=10, auto_ack=True, **GROUP) as batches:
                assert [len(next(batches)) for _ in range(2)] == [10, 10]
            assert client.xpending(name, "g")["pending"] == 0
        frame = weft.read_streams(cluster, "events:*")
        assert sorted(frame["_id"].to_list()) == sorted(each for found in ids.values() for each in found)
        assert set(frame["_stream"].to_list()) == set(names)
        frame = frame.with_columns(key=pl.col("_stream") + " " + pl.col("_id"))
        assert weft.write_hashes(cluster, frame, key_prefix="hash of ") == 240
        for row in frame.rows(named=True):
            wanted = {name: value for name, value in row.items() if name != "key"}
            found = client.hgetall(f"hash of {row['key']}")
            assert found == {name.encode(): str(value).encode() for name, value in wanted.items()}


@pytest.mark.full
def test_a_bad_entry_of_a_cluster(cluster: str, shared_server: Callable[[str], Any]) -> None:
    with closing(shared_server("redis-cluster").connect()) as client:
        for i in range(12):
            client.xadd(f"events:{i}", {"n": "x"})
        frame = weft.read_streams(cluster, "events:*", schema={"n": pl.Int64}, on_error="quarantine")
        assert len(frame) == 0
        assert [client.xlen(f"events:{i}__quarantine") for i in range(12)] == [1] * 12


def test_a_slot_that_moves_while_it_is_read(cluster: str, shared_server: Callable[[str], Any]) -> None:
    """MOVED and ASK, as a cluster says while and after it gives a slot to another node."""
    server = shared_server("redis-cluster")
    with closing(server.connect()) as client:
        slot = client.keyslot("events")
        home = client.get_node_from_key("events").port
        old = next(node for node in server.nodes if node.port == home)
        new = next(node for node in server.nodes if node.port != home)
        ids = fill_one_by_one(client, range(40))
    seen: list[str] = []
    with closing(old.connect()) as at_old, closing(new.connect()) as at_new:
        old_id, new_id = (each.execute_command("CLUSTER", "MYID").decode() for each in (at_old, at_new))

        def hand_over(source: Any, target: Any, source_id: str, target_id: str, target_port: int) -> Iterator[None]:
            target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
            source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
            source.execute_command("MIGRATE", "127.0.0.1", target_port, "events", 0, 5000)
            yield  # between: ASK
            for each in (target, source):
                each.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
            yield  # after: MOVED

        try:
            with weft.iter_stream(cluster, "events", batch_size=10, auto_ack=True, **GROUP) as batches:
                seen += next(batches)["_id"].to_list()
                for _ in hand_over(at_old, at_new, old_id, new_id, new.port):
                    seen += next(batches)["_id"].to_list()
                    assert len(weft.read_stream(cluster, "events")) == 40
                seen += next(batches)["_id"].to_list()
            assert at_new.xpending("events", "g")["pending"] == 0
        finally:
            for _ in hand_over(at_new, at_old, new_id, old_id, old.port):
                pass
    assert seen == ids


def fill_one_by_one(client: Any, numbers: range) -> list[str]:
    return [client.xadd("events", {"n": n}).decode() for n in numbers]


# ------------------------------------------------------------------------------------------- consumers that are killed

KILLED = """
import os, sys, weft
frame = weft.read_stream(sys.argv[1], "events", group="g", consumer=sys.argv[2], count=10, claim_idle=0)
print(len(frame), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.full
def test_what_killed_consumers_had_is_claimed(url: str, client: Any, count: Callable[[int], int]) -> None:
    ids = fill(client, range(1000))
    for number in range(count(100)):
        done = warm_python.run(
            [sys.executable, "-c", KILLED, url, f"worker-{number}"], capture_output=True, text=True, check=False
        )
        assert done.returncode == -9, done.stderr
        assert done.stdout == "10\n"
    frame = weft.read_stream(url, "events", group="g", consumer="last", claim_idle=0, auto_ack=True)
    assert sorted(frame["_id"].to_list()) == sorted(ids)
    assert client.xpending("events", "g")["pending"] == 0


# ------------------------------------------------------------------------------------------------------------ failover


@pytest.mark.timing
def test_a_failover_while_it_iterates(own_server: redis_server.RedisServer) -> None:
    with closing(own_server.connect()) as client:
        ids = fill(client, range(30))
    with watched(own_server) as (replica, connection):
        seen: list[str] = []
        with weft.iter_stream(connection, "events", batch_size=10, auto_ack=True, **GROUP) as batches:
            seen += next(batches)["_id"].to_list()
            wait_for_replica(own_server)
            own_server.kill()
            while len(set(seen)) < 30:
                seen += next(batches)["_id"].to_list()
        # Replication is asynchronous: what the replica had not heard of may be delivered again, and nothing is missed.
        assert sorted(set(seen)) == sorted(ids)
        with closing(replica.connect()) as client:
            assert client.xpending("events", "g")["pending"] == 0


# -------------------------------------------------------------------------------------------------------------- memory

ITERATE = """
import resource, sys, weft
url, entries, group, auto_ack = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
member = dict(group=group, consumer="c", auto_ack=auto_ack) if group else {}
rows, peak, ids = 0, [], []
for frame in weft.iter_stream(url, "events", batch_size=1000, count=entries, to="arrow", **member):
    rows += len(frame)
    if group and not auto_ack:
        weft.ack_entries(url, "events", group, frame["_id"])
    if rows in (entries // 4, entries):
        peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(rows, peak[1] - peak[0])
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("group", "auto_ack"), [("", False), ("g", True), ("g", False)], ids=["range", "group", "acks by hand"]
)
def test_memory_does_not_grow_while_iterating(
    many: tuple[str, int], shared_server: Callable[[str], Any], group: str, auto_ack: bool
) -> None:
    url, entries = many
    command = [sys.executable, "-c", ITERATE, url, str(entries), group, str(auto_ack)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows, kilobytes = map(int, done.stdout.split())
    assert rows == entries
    # To keep the rows of the last three quarters would take 20 MB and more, their ids alone 10 MB.
    print(f"{rows:,} rows: {kilobytes:,} KB more at the end than after a quarter")
    assert kilobytes < 4_000
    with closing(redis.Redis.from_url(url)) as client:
        if group:
            assert client.xpending("events", group)["pending"] == 0
            client.xgroup_destroy("events", group)


@pytest.mark.full
@pytest.mark.parametrize("group", [None, "g"])
def test_a_million_entries_are_a_million_rows(many: tuple[str, int], group: str | None) -> None:
    url, entries = many
    expected = min(entries, 1_000_000)
    member: dict[str, Any] = {"group": group, "consumer": "c", "auto_ack": True} if group else {}
    table = weft.read_stream(url, "events", schema={"n": "int64"}, count=expected, to="arrow", **member)
    assert table.num_rows == expected
    assert table["n"].to_numpy().tolist() == list(range(expected))
    assert len(set(table["_id"].to_pylist())) == expected
    with closing(redis.Redis.from_url(url)) as client:
        if group:
            assert client.xpending("events", group)["pending"] == 0
            client.xgroup_destroy("events", group)


@pytest.fixture(scope="module")
def many(shared_server: Callable[[str], servers.Server], count: Callable[..., int]) -> Iterator[tuple[str, int]]:
    """Five million entries with --full, and where they are."""
    entries = count(5_000_000, 240_000)
    with shared_server("redis").database() as url:
        with closing(redis.Redis.from_url(url)) as client:
            for first in range(0, entries, 10_000):
                client.eval(ADD, 1, "events", first, first + 9_999, "some text that takes a few bytes more")
        yield url, entries


ADD = """
for n = ARGV[1], ARGV[2] do redis.call('XADD', KEYS[1], '*', 'n', string.format('%d', n), 'text', ARGV[3]) end
"""
