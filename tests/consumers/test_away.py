"""A server that is restarted, and replies that are lost on their way."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

import redis_server
import servers
import weft
from consumers.cutter import Cutter
from consumers.numbered import drained, fill, numbers
from weft.project import Project, use
from weft.streams.runtime import close
from weft.systems.redis import scripts
from workers import declare


@pytest.mark.timing
@pytest.mark.parametrize("member", [{}, {"group": "g", "consumer": "a"}], ids=["alone", "group"])
async def test_killed_and_started_again(own_server: servers.Server, member: dict[str, str]) -> None:
    async with (
        weft.Redis.from_url(own_server.url()) as client,
        client.xconsumer(streams=["s"], timeout=60_000, buffer_size=3, **member) as consumer,
    ):
        found = []
        for number in range(20):
            await client.xadd("s", {"n": number})
            waiting = asyncio.create_task(consumer.get_entry())
            if number % 7 == 3:
                own_server.kill()
                await asyncio.to_thread(own_server.start)
            found.append(await waiting)
        # What is acknowledged on the disk is there, so nothing is missed; a member may be given some again.
        assert sorted(set(numbers(found))) == list(range(20))
        if not member:
            assert numbers(found) == list(range(20))


@pytest.mark.timing
async def test_restarted_without_its_data(own_server: servers.Server) -> None:
    async with (
        weft.Redis.from_url(own_server.url()) as client,
        client.xconsumer(streams=["s"], group="g", consumer="a", timeout=60_000) as consumer,
    ):
        await fill(client, 3)
        assert numbers([await consumer.get_entry() for _ in range(3)]) == [0, 1, 2]
        own_server.kill()
        shutil.rmtree(own_server.data / "appendonlydir")
        await asyncio.to_thread(own_server.start)
        async with weft.Redis.from_url(own_server.url()) as other:
            await other.xadd("s", {"n": 7})
        assert numbers([await consumer.get_entry()]) == [7]
        assert consumer.recovered == 1


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("killed", [1, 3], ids=["one", "all"])
async def test_nodes_of_a_cluster_killed(need_server: Callable[[str], None], killed: int) -> None:
    need_server("redis-cluster")
    own: Any = servers.KINDS["redis-cluster"]()
    own.start()
    streams = ["one", "two", "three"]
    try:
        async with weft.RedisCluster("127.0.0.1", own.nodes[0].port) as client:
            await fill(client, 10, *streams)
            async with client.xconsumer(
                streams=streams, group="g", consumer="a", timeout=60_000, buffer_size=2
            ) as consumer:
                found = [await consumer.get_entry() for _ in range(4)]
                for node in own.nodes[-killed:]:
                    node.kill()
                waiting = asyncio.create_task(consumer.get_batch())
                await asyncio.to_thread(own.start)
                found += await waiting
                while len({(stream, entry.identifier) for stream, entry in found}) < 30:
                    found += await consumer.get_batch()
    finally:
        own.kill()


@pytest.mark.full
@pytest.mark.timing
async def test_failed_over(need_server: Callable[[str], None]) -> None:
    """A replica takes the place of the server that a member reads from."""
    need_server("redis-cluster")
    own: Any = servers.KINDS["redis-cluster"]()
    own.start()
    replica = redis_server.RedisNode()
    replica.start()
    try:
        async with weft.RedisCluster("127.0.0.1", own.nodes[0].port) as client:
            await client.initialize()
            port = client.get_node_from_key("s").port
            master = next(each for each in own.nodes if each.port == port)
            await asyncio.to_thread(follow, replica, master)
            async with client.xconsumer(streams=["s"], group="g", consumer="a", timeout=60_000) as consumer:
                found = []
                for number in range(10):
                    waiting = asyncio.create_task(consumer.get_entry())
                    if number == 5:
                        await asyncio.to_thread(take_over, replica)
                        await asyncio.to_thread(master.kill)
                    await client.xadd("s", {"n": number})
                    found.append(await waiting)
            assert numbers(found) == list(range(10))
    finally:
        replica.kill()
        own.kill()


def follow(replica: Any, master: Any) -> None:
    with contextlib.closing(master.connect()) as there, contextlib.closing(replica.connect()) as here:
        name = there.execute_command("CLUSTER", "MYID").decode()
        here.execute_command("CLUSTER", "MEET", "127.0.0.1", master.port, master.bus_port)
        servers.wait_until(lambda: name in str(here.execute_command("CLUSTER", "NODES")), "the nodes to meet")
        here.execute_command("CLUSTER", "REPLICATE", name)
        servers.wait_until(lambda: here.info("replication").get("master_link_status") == "up", "the replica")


def take_over(replica: Any) -> None:
    with contextlib.closing(replica.connect()) as here:
        here.execute_command("CLUSTER", "FAILOVER")
        servers.wait_until(lambda: here.info("replication")["role"] == "master", "the replica to take over")


@pytest_asyncio.fixture
async def cutter(single_url: str) -> AsyncIterator[Cutter]:
    async with Cutter(single_url) as running:
        yield running


async def test_the_reply_with_new_entries_is_lost(cutter: Cutter, single: weft.Redis) -> None:
    """They are pending under this member's name, and a client that just asks again never sees them."""
    await fill(single, 10)
    async with (
        weft.Redis.from_url(cutter.url) as client,
        client.xconsumer(streams=["s"], group="g", consumer="a", buffer_size=2) as consumer,
    ):
        first = await consumer.get_batch()
        cutter.cut = b"XREADGROUP"
        rest = await drained(consumer)
        assert cutter.cuts == 1
        assert numbers(first + rest) == list(range(10))


async def test_the_first_reply_is_lost(cutter: Cutter, single: weft.Redis) -> None:
    """What the member left in an earlier life stays as it was: nobody asked for its backlog."""
    await fill(single, 2)
    await single.xgroup_create("s", "g", "0")
    await single.xreadgroup("g", "a", {"s": ">"})
    await fill(single, 3)
    async with (
        weft.Redis.from_url(cutter.url) as client,
        client.xconsumer(streams=["s"], group="g", consumer="a", buffer_size=1) as consumer,
    ):
        cutter.cut = b"XREADGROUP"
        assert numbers(await drained(consumer)) == [0, 1, 2]
        assert cutter.cuts == 1
    assert (await single.xpending("s", "g")).pending == 5


async def digest_of(client: weft.Redis, script: str) -> bytes:
    """What a request to run the script holds. The server has it then, so that it runs at once."""
    text, digest = scripts.source(script)
    await client.script_load(text)
    return digest.encode()


@pytest.mark.parametrize("script", ["member_pending", "member_take"])
async def test_a_reply_about_entries_given_back_is_lost(cutter: Cutter, single: weft.Redis, script: str) -> None:
    await fill(single, 4, "s", "t")
    async with single.xconsumer(streams=["s", "t"], group="g", consumer="b", buffer_size=9) as other:
        await other.ack(await other.get_entry())
    async with (
        weft.Redis.from_url(cutter.url) as client,
        client.xconsumer(streams=["s", "t"], group="g", consumer="a", buffer_size=9) as consumer,
    ):
        cutter.cut = await digest_of(single, script)
        found = await drained(consumer)
        assert sorted(numbers(found)) == [0, 1, 1, 2, 2, 3, 3]
        assert {entry.deliveries for _, entry in found} == {1}
        assert cutter.cuts == 1


@pytest.mark.parametrize("script", ["member_pending", "member_take"])
async def test_a_reply_about_idle_entries_is_lost(cutter: Cutter, single: weft.Redis, script: str) -> None:
    """Once claimed they are idle no more: who just asks again gets nothing, and they are hidden for an hour."""
    await fill(single, 5)
    await hold(single, "dead", idle=7_200_000)
    async with (
        weft.Redis.from_url(cutter.url) as client,
        client.xconsumer(
            streams=["s"], group="g", consumer="a", buffer_size=2, claim_idle=3_600_000, max_deliveries=2
        ) as consumer,
    ):
        cutter.cut = await digest_of(single, script)
        found = await drained(consumer)
        assert numbers(found) == list(range(5))
        assert {entry.deliveries for _, entry in found} == {2}  # not more: that nobody saw them is no delivery
        assert cutter.cuts == 1


async def hold(client: weft.Redis, name: str, *, idle: int) -> None:
    """Be given all that there is, and do nothing for so long."""
    await client.xgroup_create("s", "g", "0")
    ids = [entry.identifier for _, entries in await client.xreadgroup("g", name, {"s": ">"}) for entry in entries]
    await client.xclaim("s", "g", name, 0, ids, idle=idle, justid=True)


async def test_what_was_claimed_and_is_in_hand_does_not_come_again(cutter: Cutter, single: weft.Redis) -> None:
    await fill(single, 5)
    await hold(single, "dead", idle=7_200_000)
    async with (
        weft.Redis.from_url(cutter.url) as client,
        client.xconsumer(streams=["s"], group="g", consumer="a", buffer_size=9, claim_idle=3_600_000) as consumer,
    ):
        assert numbers(await consumer.get_batch()) == list(range(5))
        await fill(single, 2)
        cutter.cut = b"XREADGROUP"
        found = await drained(consumer)
        assert numbers(found) == [0, 1]
        assert [entry.deliveries for _, entry in found] == [1, 1]
        assert cutter.cuts == 1


async def test_nobody_buries_what_nobody_saw(cutter: Cutter, single: weft.Redis) -> None:
    """The server counts the delivery in a reply that was lost. We do not."""
    await fill(single, 3)
    async with (
        weft.Redis.from_url(cutter.url) as client,
        client.xconsumer(streams=["s"], group="g", consumer="a", buffer_size=9, max_deliveries=1) as consumer,
    ):
        cutter.cut = b"XREADGROUP"
        assert numbers(await drained(consumer)) == [0, 1, 2]
        assert cutter.cuts == 1


@pytest.mark.parametrize("script", ["member_pending", "member_take"])
async def test_a_reply_about_the_backlog_is_lost(cutter: Cutter, single: weft.Redis, script: str) -> None:
    await fill(single, 4, "s", "t")
    for stream in ("s", "t"):
        await single.xgroup_create(stream, "g", "0")
    await single.xreadgroup("g", "a", {"s": ">", "t": ">"})
    digest = await digest_of(single, script)
    async with (
        weft.Redis.from_url(cutter.url) as client,
        client.xconsumer(
            streams=["s", "t"], group="g", consumer="a", buffer_size=1, start_from_backlog=True
        ) as consumer,
    ):
        found = []
        for cut in (digest, digest, b""):
            cutter.cut = cut
            while batch := await consumer.get_batch():
                found += batch
                if cut:
                    break
        assert cutter.cuts == 2
        assert sorted(numbers(found)) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert {entry.deliveries for _, entry in found} == {2}


@pytest.mark.parametrize("script", ["lease", "settle"])
async def test_a_reply_about_a_declared_stream_is_lost(cutter: Cutter, single: weft.Redis, script: str) -> None:
    """What was leased comes, and an ack that was carried out is not refused when it is repeated."""
    digest = await digest_of(single, script)
    with use(Project()) as project:
        connection = weft.connect(url=cutter.url)
        one = declare("one", fields={"n": "int64"}, connection=connection)
        await weft.publish(one, [{"n": n} for n in range(6)])
        async with connection.xconsumer(streams=[one], group="g", consumer="a", buffer_size=2) as consumer:
            first = await consumer.get_batch()
            cutter.cut = digest
            await consumer.ack(first)
            rest = await drained(consumer)
            assert [entry.field_values["n"] for _, entry in first + rest] == list(range(6))
            await consumer.ack(rest)
        assert cutter.cuts == 1
        (group,) = await weft.groups(one)
        assert (group["lag"], group["pending"]) == (0, 0)
        await asyncio.to_thread(close, project)


async def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who never answered is not waited for."""
    monkeypatch.setattr("weft.systems.redis.group_member.PATIENCE_SECONDS", math.inf)
    at_once = Retry(NoBackoff(), 0)
    async with weft.Redis("127.0.0.1", servers.free_port(), password="hunter2", retry=at_once) as client:
        with pytest.raises(weft.ConnectionFailedError, match="Check host and port") as raised:
            await client.xconsumer(streams=["s"]).get_entry()
        assert "hunter2" not in str(raised.value)
    with pytest.raises(weft.ConnectionFailedError, match="Check host and port"):
        async with weft.connect(url=f"redis://127.0.0.1:{servers.free_port()}/?cluster=true").xconsumer(streams=["s"]):
            pass
    with pytest.raises(weft.ConnectionFailedError, match="Check host and port"):
        await weft.connect(url=f"redis://127.0.0.1:{servers.free_port()}").xconsumer(streams=["s"]).get_entry()


@pytest.mark.timing
async def test_it_stays_away(own_server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is said, and asking again goes on."""
    monkeypatch.setattr("weft.systems.redis.group_member.PATIENCE_SECONDS", 0.1)
    async with weft.Redis.from_url(own_server.url()) as client:
        await fill(client, 3)
        async with client.xconsumer(streams=["s"], group="g", consumer="a", timeout=60_000) as consumer:
            found = [await consumer.get_entry()]
            own_server.kill()
            with pytest.raises(weft.ConnectionFailedError, match="Ask for the next entry again"):
                await consumer.get_entry()
            await asyncio.to_thread(own_server.start)
            found += [await consumer.get_entry() for _ in range(2)]
        assert numbers(found) == [0, 1, 2]


async def test_a_wrong_password_is_not_tried_again(own_server: servers.Server) -> None:
    async with weft.Redis.from_url(own_server.url()) as admin:
        await admin.config_set("requirepass", "right")
    async with weft.Redis.from_url(own_server.url(), password="wrong") as client:
        with pytest.raises(weft.ConnectionFailedError, match="refuses the consumer") as raised:
            await client.xconsumer(streams=["s"]).get_entry()
        assert "wrong" not in str(raised.value).replace("WRONGPASS", "")


@pytest.mark.full
async def test_a_wrong_password_of_a_cluster(cluster: weft.RedisCluster) -> None:
    node = cluster.get_default_node()
    connection = weft.connect(url=f"redis://nobody:hunter2@{node.host}:{node.port}/?cluster=true")
    with pytest.raises(weft.ConnectionFailedError, match="refuses the consumer") as raised:
        await connection.xconsumer(streams=["s"]).get_entry()
    assert "hunter2" not in str(raised.value)


async def test_a_client_of_one_server_on_a_cluster(cluster: weft.RedisCluster) -> None:
    node = cluster.get_default_node()
    streams = [f"s{n}" for n in range(9)]
    async with weft.Redis(node.host, node.port) as client:
        with pytest.raises(weft.SettingsError, match=r"is a cluster[\s\S]*RedisCluster"):
            await client.xconsumer(streams=streams).get_entry()
