"""`/api/v1/dead-letters`: what was put aside, by pipeline, stream and error; what a replay or purge would do."""

from __future__ import annotations

import asyncio
import queue
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import weft
from operations_project import declare_project, make_key
from weft import expectations
from weft.cli.dlq import dlq
from weft.engine.run import PipelineRun
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.dead_letter_selection import summary
from weft.engine.streaming.dead_letters import DeadLetterBox
from weft.pipelines.streaming.declare import find
from weft.project import Project
from weft.server.actions import Commands
from weft.server.dead_letters import Chosen, DeadLetterCache, _room, read_letters
from weft.server.keys import key_table
from weft.server.quarantine import _room as of_targets
from weft.server.quarantine import read_quarantine
from weft.server.rates import Rate
from weft.systems.dead_letter_store import DeadLetter, StoredLetter
from workers import declare

pytestmark = pytest.mark.parametrize("system", ["sqlite"], indirect=True)
ALL = "/api/v1/dead-letters"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def letters(streams: Project) -> list[str]:
    """The ids of three letters of `copies`."""
    declare_project()
    bad = declare("bad", fields={"n": "int64"}, on_schema_drift="quarantine", max_deliveries=1)

    @weft.streaming_pipeline(name="copies", source=bad, target="default", target_table="t", dead_letter_table="failed")
    def copies() -> None: ...

    weft.publish_sync("bad", [{"n": 1}, {"n": "two"}])
    box = DeadLetterBox(find("copies"))
    box.put([DeadLetter("read", HOSTILE, "bad", "{" * 100_000, "1")], BatchId("query", 0), "read")
    for number in range(2):
        letter = DeadLetter("store", "A null in n.\nIn row 1.", "bad", f'{{"n": {number}}}', target="t")
        box.put([letter], BatchId("query", 1 + number), "store")
    return [each.letter_id for each in box.letters()]


def put_aside() -> None:
    """Let the pipeline `lines` put four rows aside."""
    rows = [{"n": number} for number in range(-4, 2)]
    checks: dict[str, Any] = {"expectations": [expectations.range("n", min=0)], "on_quality_failure": "quarantine"}
    declared = weft.pipeline(target="lines", name="lines", **checks)(lambda: rows)
    PipelineRun(declared, "first", datetime.now(UTC)).execute()


def test_what_was_put_aside(letters: list[str], http: Any) -> None:
    put_aside()
    found = http.get(ALL).json()
    (copies,) = found["pipelines"]
    assert (copies["pipeline"], copies["count"], copies["more"], copies["problem"]) == ("copies", 3, False, None)
    assert copies["place"] == "table failed of the connection 'default'"
    assert [(each["stage"], each["error"], each["count"]) for each in copies["groups"]] == [
        ("store", "A null in n.", 2),
        ("read", HOSTILE, 1),
    ]
    assert [(each["stream"], each["kind"], each["count"]) for each in found["streams"]] == [
        ("bad", "dead letters", 0),
        ("bad", "quarantined", 1),
    ]
    (quarantine,) = found["quarantines"]
    assert (quarantine["pipeline"], quarantine["count"], quarantine["tables"]) == ("lines", 4, ["lines__quarantine"])


def test_rows_in_quarantine(streams: Project, http: Any) -> None:
    """They are replayed and purged by the same command as at a terminal, with a key alone."""
    put_aside()
    key, reader = make_key("admin"), make_key("read", "write")
    place, one = "/api/v1/pipelines/lines/quarantine", {"dry_run": True, "all": True}
    (table,) = http.get(place, headers=key).json()["tables"]
    group = {"group": table["groups"][0]["group"], "rows": 4}
    for action in ("replay", "purge"):
        assert http.post(f"{place}/{action}", json=one).status_code == 401
        assert http.post(f"{place}/{action}", json=one, headers=reader).status_code == 403
        for asked in (one, group | {"dry_run": True}):
            plan = http.post(f"{place}/{action}", json=asked, headers=key).json()
            assert (plan["letters"], plan["held"], plan["place"], plan["targets"]) == (
                4,
                {},
                "lines__quarantine",
                ["lines"],
            )
        for wrong in ({"dry_run": True}, {"all": True}, group | {"all": True}, group | {"group": "x"}, {"some": 1}):
            assert http.post(f"{place}/{action}", json=wrong, headers=key).status_code == 422, wrong
        assert http.post("/api/v1/pipelines/no/quarantine/purge", json=one, headers=key).status_code == 404


def test_the_letters_of_a_pipeline(letters: list[str], http: Any) -> None:
    found = http.get(f"{ALL}/copies").json()
    assert {each["letter_id"] for each in found["letters"]} == set(letters)
    assert [each["stage"] for each in http.get(f"{ALL}/copies?stage=read").json()["letters"]] == ["read"]
    assert len(http.get(f"{ALL}/copies?error=NULL&limit=1").json()["letters"]) == 1
    assert http.get(f"{ALL}/copies?stage=odd").status_code == 422
    assert http.get(f"{ALL}/nobody").status_code == 404
    # One without a place for them is no error.
    assert "no place" in http.get(f"{ALL}/loader").json()["problem"]


def test_one_letter_with_the_beginning_of_its_payload(letters: list[str], http: Any) -> None:
    read = next(each for each in http.get(f"{ALL}/copies").json()["letters"] if each["stage"] == "read")
    assert (len(read["payload"]), read["cut"]) == (2000, True)
    shown = http.get(f"{ALL}/copies/{read['letter_id'][:12]}").json()
    assert (shown["letter_id"], shown["error"], shown["offset"]) == (read["letter_id"], HOSTILE, "1")
    assert (len(shown["payload"]), shown["cut"]) == (64 * 1024, True)
    missing = http.get(f"{ALL}/copies/nothing")
    assert (missing.status_code, missing.json()["detail"]) == (404, "copies has no dead letter 'nothing'.")


def test_what_would_be_done(letters: list[str], http: Any) -> None:
    key = make_key("admin")

    def planned(action: str, **body: Any) -> Any:
        return http.post(f"{ALL}/copies/{action}", headers=key, json=body | {"dry_run": True}).json()

    plan = planned("replay", all=True)
    assert (plan["letters"], plan["held"], plan["targets"]) == (3, {}, ["t"])
    assert planned("replay", error="null")["letters"] == 2
    assert planned("purge", stage="read")["letters"] == 1
    assert planned("purge", ids=[letters[0][:12]])["letters"] == 1
    assert planned("purge", all=True, before="2020-01-01T00:00:00Z")["letters"] == 0
    assert len(list(DeadLetterBox(find("copies")).letters())) == 3, "nothing was done"


def test_a_group_is_its_letters_alone(letters: list[str], http: Any) -> None:
    """Other errors have the text of one in theirs; what is shown is without secrets, may be empty, or have no text."""
    box = DeadLetterBox(find("copies"))
    alike = ["a NULL in n.", "Again: A null in n.", "", "\0", "\ufffd", "postgres://u:one@h/d", "postgres://u:two@h/d"]
    for number, error in enumerate(alike):
        box.put([DeadLetter("store", error, "bad", "{}", target="t")], BatchId("query", 10 + number), "store")
    box.put([DeadLetter("read", "A null in n.", "bad", "{}")], BatchId("query", 30), "read")
    key = make_key("admin")
    groups = http.get(f"{ALL}/copies", headers=key).json()["groups"]
    assert sorted(each["count"] for each in groups) == [1] * 9 + [2]
    assert len({each["group"] for each in groups}) == 10
    for each in groups:
        for action in ("replay", "purge"):
            body = {"group": each["group"], "dry_run": True}
            plan = http.post(f"{ALL}/copies/{action}", headers=key, json=body).json()
            assert plan["letters"] == each["count"], each
    # The command that is started takes the same.
    chosen = next(each["group"] for each in groups if each["count"] == 2)
    words = ["purge", "copies", *Chosen(group=chosen).words(), "--yes"]
    done = CliRunner().invoke(dlq, words)
    assert done.output == "copies: removed 2 letters.\n"
    left = [(each.stage, each.error) for each in box.letters()]
    assert sorted(left) == sorted([*(("store", each) for each in alike), ("read", "A null in n."), ("read", HOSTILE)])


def test_letters_that_reading_would_take(letters: list[str], http: Any) -> None:
    """A page that reads them again and again would keep a removal from them. No broker is asked, there is none."""
    broker = weft.RabbitMQConnection("amqp://127.0.0.1:1", name="broker")
    failed: dict[str, Any] = {"dead_letter_topic": "failed", "dead_letter_connection": broker}

    @weft.streaming_pipeline(
        name="queued", source=find("copies").sources[0], target="default", target_table="t", **failed
    )
    def queued() -> None: ...

    key = make_key("admin")
    shown = http.get(f"{ALL}/queued", headers=key).json()
    assert (shown["count"], shown["letters"]) == (None, [])
    assert "takes them" in shown["problem"] and "weft dlq list queued" in shown["problem"]
    body = {"all": True, "dry_run": True}
    refused = http.post(f"{ALL}/queued/purge", headers=key, json=body)
    assert (refused.status_code, refused.json()["hint"]) == (409, "weft dlq list queued")
    assert http.get(f"{ALL}/queued/abc", headers=key).status_code == 409


def test_a_secret_at_the_end_of_what_is_shown(letters: list[str], http: Any) -> None:
    """It is removed before the text is cut, which would leave the half of it."""
    error = "e" * 280 + " postgres://ann:hunter2@host/db and more"
    box = DeadLetterBox(find("copies"))
    box.put([DeadLetter("store", error, "bad", "{}", target="t")], BatchId("query", 40), "store")
    shown = [each["error"] for each in http.get(f"{ALL}/copies").json()["groups"]]
    (shown_error,) = [each for each in shown if each.startswith("ee")]
    assert "hun" not in shown_error and len(shown_error) <= 300
    url = "/api/v1/streams/bad"
    taken = http.post(f"{url}/consume", json={"consumer": "billing", "batch_size": 1}).json()
    http.post(f"{url}/nack", json={"consumer": "billing", "events": taken["events"], "delay": 0, "reason": error})
    http.post(f"{url}/consume", json={"consumer": "billing"})
    groups = http.get(f"{url}/rejected").json()["groups"]
    (reason,) = [each["reason"] for each in groups if each["kind"] == "dead letter"]
    assert reason.startswith("ee") and "hun" not in reason and len(reason) <= 300


def test_more_letters_than_are_looked_at(letters: list[str], http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is called the newest then: they come in no order."""
    for limit in ("_LETTERS", "_RECORDS"):
        with monkeypatch.context() as small:
            small.setattr(f"weft.server.dead_letters.{limit}", 2)
            found = read_letters(find("copies"))
        assert found is not None
        assert (found["count"], found["more"], found["newest"]) == (2, True, None)
    found = read_letters(find("copies"))
    assert found is not None and (found["count"], found["more"]) == (3, False)
    assert found["newest"] == max(each.failed_at for each in DeadLetterBox(find("copies")).letters())


def test_a_slow_store_holds_up_nothing_else(letters: list[str], http: Any) -> None:
    """All requests that may wait for it do: the run log and the audit log answer all the same."""
    key = make_key("admin")
    with ExitStack() as waiting:
        while _room.acquire(blocking=False):
            waiting.callback(_room.release)
        body = {"all": True, "dry_run": True}
        refused = http.post(f"{ALL}/copies/purge", headers=key, json=body)
        assert (refused.status_code, "too many requests" in refused.json()["detail"]) == (503, True)
        for path in ("audit", "runs", "scheduler", "streams/bad/history", "dead-letters", "pipelines/revenue/plan"):
            assert http.get(f"/api/v1/{path}", headers=key).status_code == 200, path
    assert http.post(f"{ALL}/copies/purge", headers=key, json=body).status_code == 200


def test_a_slow_target_holds_up_nothing_else(letters: list[str], http: Any) -> None:
    quarantine = "/api/v1/pipelines/customers/quarantine"
    with ExitStack() as waiting:
        while of_targets.acquire(blocking=False):
            waiting.callback(of_targets.release)
        assert http.get(quarantine).status_code == 503
        assert http.get("/api/v1/runs").status_code == 200
    assert http.get(quarantine).json()["tables"] == []


def test_a_look_at_a_target_makes_no_file(streams: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN_LAKE", f"duckdb:///{tmp_path / 'lake.duckdb'}")
    declared = weft.pipeline(target="lines", target_connection="lake", name="lines")(lambda: [{"n": 1}])
    assert read_quarantine(declared) == []
    assert not (tmp_path / "lake.duckdb").exists()


def test_a_list_takes_no_longer_than_one_store(streams: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them hang: nine are read in two rounds, of half of the time each."""
    waited = []

    async def hangs(_: DeadLetterCache, pipeline: Any, seconds: float) -> dict[str, Any]:
        waited.append(seconds)
        return {"of": pipeline}

    monkeypatch.setattr(DeadLetterCache, "of", hangs)
    for count, rounds in ((0, 1), (8, 1), (9, 2), (40, 5)):
        waited.clear()
        found = asyncio.run(DeadLetterCache().of_all(list(range(count))))  # type: ignore[arg-type]
        assert [each["of"] for each in found] == list(range(count))
        assert waited == [8.0 / rounds] * count


def test_rejected_events_of_a_stream(letters: list[str], http: Any) -> None:
    # The service reads keys with the first request, and again after seconds.
    key, reader, asked = make_key("admin"), make_key("read", "write"), {"dry_run": True}
    for action in ("replay", "purge"):
        path = f"/api/v1/streams/bad__quarantine/{action}"
        plan = http.post(path, headers=key, json=asked).json()
        assert (plan["letters"], plan["of"], plan["upto"]) == (1, ["bad"], "1")
        # A stream itself loses nothing here.
        for wrong in ({"dry_run": True}, {"upto": "1"}):
            assert http.post(f"/api/v1/streams/bad/{action}", headers=key, json=wrong).status_code == 409
        for wrong in ({}, {"upto": 1}, {"upto": "-1"}, {"upto": str(2**63)}, {"all": True}):
            assert http.post(path, headers=key, json=wrong).status_code == 422, wrong
        assert http.post(path, headers=reader, json=asked).status_code == 403
        assert http.post(path, json=asked).status_code == 401


def test_a_choice_is_exact_and_needs_a_key(letters: list[str], http: Any) -> None:
    everything, reader, key = {"all": True, "dry_run": True}, make_key("read", "write"), make_key("admin")
    assert http.post(f"{ALL}/copies/purge", json=everything).status_code == 401
    assert http.post(f"{ALL}/copies/purge", headers=reader, json=everything).status_code == 403
    for body in (
        {},
        {"all": False},
        {"all": True, "error": "x"},
        {"ids": ["a"], "stage": "read"},
        {"stage": "replay"},
        {"error": ""},
        {"group": "store"},
        {"all": True, "group": "0" * 32},
        {"all": True, "before": "2020-01-01T00:00:00"},
        {"all": True, "before": "0001-01-01T00:00:00+14:00"},
        {"all": True, "before": "9999-12-31T23:59:59-14:00"},
        {"ids": ["a\0"]},
        {"error": "a\0"},
        {"ids": ["x"] * 101},
        {"every": True},
    ):
        assert http.post(f"{ALL}/copies/purge", headers=key, json=body).status_code == 422, body
    before = {"all": True, "before": "2020-01-01T00:00:00Z"}
    assert http.post(f"{ALL}/copies/replay", headers=key, json=before).status_code == 422
    assert http.post(f"{ALL}/copies/purge", headers=key, content=b"all").status_code == 415
    assert http.post(f"{ALL}/nobody/purge", headers=key, json=everything).status_code == 404


def test_the_options_of_the_command(system: Any) -> None:
    assert Chosen(all=True).words() == ["--all"]
    assert Chosen(error="-x", stage="read").words() == ["--error=-x", "--stage=read"]
    assert Chosen(all=True, before=datetime(2026, 1, 2, tzinfo=UTC)).words() == ["--before=2026-01-02T00:00:00+00:00"]


def test_many_errors_do_not_fill_the_memory(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.streaming.dead_letter_selection._SAMPLES", 5)
    now = datetime.now(UTC)

    def letter(number: int, error: str) -> StoredLetter:
        more = {"failed_at": now, "letter_id": str(number), "pipeline": "p"}
        return StoredLetter("read", error, "s", "x" * 5000, **more)  # type: ignore[arg-type]

    many = [letter(number, f"error {number}") for number in range(100)] + [letter(100, "often"), letter(101, "often")]
    found = summary(many)
    assert (found.count, found.more, found.newest) == (102, False, now)
    assert (found.groups[0].error, found.groups[0].count) == ("often", 2)
    assert len(found.groups) <= 11
    assert len(found.groups[0].newest.payload) == 2000
    assert summary(many, most=10).more


def test_what_a_command_says_is_reported(streams: Project) -> None:
    said: queue.Queue[str] = queue.Queue()
    Commands().start(["dlq", "purge", "nobody", "--all"], said.put)
    assert said.get(timeout=120).startswith("failed: ")


def test_who_may_act(letters: list[str], http: Any) -> None:
    reads, writes, acts = make_key("read"), make_key("write"), make_key("admin", name="Ann")
    with key_table() as table:
        slow = {"authorization": f"Bearer {table.create(name='slow', scopes=['admin'], rate=Rate(0.001, 1))[1]}"}
    nobody = http.get("/api/v1/me").json()
    assert (nobody["key"], nobody["may_act"], nobody["reads_all"]) == (None, False, False)
    assert "scope admin" in nobody["why_not"]
    reader = http.get("/api/v1/me", headers=reads).json()
    assert (reader["key"]["scopes"], reader["may_act"], reader["reads_all"]) == (["read"], False, True)
    assert "needs admin" in reader["why_not"]
    ann = http.get("/api/v1/me", headers=acts).json()
    assert (ann["key"]["name"], ann["may_act"], ann["why_not"]) == ("Ann", True, None)
    writer = http.get("/api/v1/me", headers=writes).json()
    assert (writer["key"]["scopes"], writer["may_act"], writer["reads_all"]) == (["write"], False, False)
    # It is one request for the limit of a key.
    answers = [http.get("/api/v1/me", headers=slow) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 429] and answers[0].json()["reads_all"]
    # The token of a stream is no wrong key; a wrong key is.
    token = {"authorization": "Bearer of-a-stream"}
    assert [http.get("/api/v1/me", headers=token).status_code for _ in range(30)] == [200] * 30
    assert http.get("/api/v1/me", headers={"authorization": "Bearer weft_wrong"}).status_code == 401
