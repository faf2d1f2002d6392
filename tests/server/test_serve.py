"""`weft serve` as a process: how it starts, answers, loses a worker, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import warm_python
from served import PREFIX, read_all, start
from servers import wait_until
from weft.operate.runlog import open_run_log
from weft.operate.spool import FILE

ORDERS = """
    @weft.stream(fields={"n": "int64"})
    def orders(): ...
"""
# It stops soon, whoever hangs.
SOON = {"weft.server.worker.STOP_SECONDS": 2}


def test_publishes_and_reads(server):
    served = server(ORDERS)
    done = served.publish("orders", {"n": 1})
    assert done["status"] == "accepted"
    assert [event["n"] for event in served.events("orders")] == [1]


@pytest.mark.timing
def test_stops_on_a_signal(server):
    served = server(ORDERS, "--workers", "2")
    served.publish("orders", {"n": 1})
    assert len(served.workers()) == 2
    assert served.stop() == 0
    assert served.log[-1]["message"] == "the service has stopped"


@pytest.mark.timing
def test_starts_a_killed_worker_again(server):
    served = server(ORDERS)
    for n in range(3):
        served.publish("orders", {"n": n})
        (worker,) = served.workers()
        os.kill(worker, signal.SIGKILL)
        # On one socket for all of them: what connects meanwhile waits, and is not refused.
        served.client.close()
        del served.client
        assert served.client.get("/healthz").status_code == 200
    assert [event["n"] for event in served.events("orders")] == [0, 1, 2]


@pytest.mark.timing
def test_finishes_what_it_accepted(server):
    """A request whose body is still on its way when the signal comes, a long poll, a subscriber, and a new client."""
    served = server(ORDERS)
    body = json.dumps({"n": 7}).encode()
    head = (
        f"POST {PREFIX}/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    poll = json.dumps({"consumer": "c", "wait": 60}).encode()
    poll_head = head.replace("/orders ", "/orders/consume ").replace(f": {len(body)}\r", f": {len(poll)}\r")
    with served.subscribe("orders") as frames, served.connect() as publisher, served.connect() as waiting:
        assert next(frames)[0] == ":"
        waiting.sendall(poll_head.encode() + poll)
        publisher.sendall(head.encode() + body[:3])
        assert _asks(served)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: _is_refused(served), "new connections to be refused")
        kind, data = next(frames)
        assert (kind, data["resume_after"]) == ("stream.closing", 0)
        assert list(frames) == []  # the connection ends
        assert b'"count":0' in read_all(waiting)
        publisher.sendall(body[3:])
        answer = read_all(publisher)
    assert answer.startswith(b"HTTP/1.1 202 ")
    assert served.stop() == 0
    again = server(ORDERS, folder=served.folder)
    assert [event["n"] for event in again.events("orders")] == [7]


def _asks(served) -> bool:
    """Whatever was sent before has arrived too, once this is answered."""
    return served.client.get("/healthz").status_code == 200


def _is_refused(served) -> bool:
    try:
        served.connect().close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.timing
def test_does_not_wait_for_a_client_that_hangs(server):
    served = server(ORDERS, constants=SOON)
    with served.connect() as hanging:
        hanging.sendall(
            f"POST {PREFIX}/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 9\r\n\r\n".encode()
        )
        assert _asks(served)
        assert served.stop() == 0
    # Neither killed.
    assert not [line for line in served.log if "killed" in line["message"]]


def test_a_client_that_leaves_its_long_poll_gets_no_events(server):
    served = server(ORDERS)
    body = json.dumps({"consumer": "c", "wait": 60}).encode()
    with served.connect() as waiting:
        waiting.sendall(
            f"POST {PREFIX}/orders/consume HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert _asks(served)
    wait_until(lambda: any(line.get("path", "").endswith("/consume") for line in served.log), "the request to end")
    served.publish("orders", {"n": 1})
    found = served.client.post(f"{PREFIX}/orders/consume", json={"consumer": "c"}).json()
    assert [event["n"] for event in found["events"]] == [1]


@pytest.mark.timing
def test_workers_end_with_their_parent(server):
    served = server(ORDERS, "--workers", "2")
    workers = served.workers()

    def runtimes() -> set[str]:
        files = Path(f"/proc/{workers[0]}/fd").iterdir()
        return {found[0] for each in files if (found := re.search(r".*/weft-serve-[^/ ]+", os.readlink(each)))}

    # One of the two answers: the other one may be at its start.
    wait_until(lambda: len(runtimes()) == 1, "the folder that the workers share")
    (runtime,) = runtimes()
    assert os.path.exists(runtime)
    served.process.kill()
    served.process.wait()
    served.code = 0
    wait_until(lambda: not any(os.path.exists(f"/proc/{worker}") for worker in workers), "the workers to end")
    # What they shared is in memory, and nobody else would remove it.
    assert not os.path.exists(runtime)


def test_two_workers_share_a_stream(server):
    served = server(ORDERS, "--workers", "2")
    for n in range(40):
        with served.new_client() as client:  # a connection each: any worker may take it
            assert client.post(f"{PREFIX}/orders", json={"n": n}).status_code == 202
    assert [event["n"] for event in served.events("orders")] == list(range(40))
    answered = {line["process"] for line in served.log if line.get("path") == f"{PREFIX}/orders"}
    assert answered <= set(served.workers())


def test_logs_a_line_a_request(server):
    served = server(ORDERS)
    answer = served.client.get("/api/v1/streams?ticket=s3cret", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    other = served.client.get("/api/v1/streams", headers={"x-request-id": "not\tsane"})
    assert other.headers["x-request-id"] != "not\tsane"
    wait_until(lambda: len([line for line in served.log if line["message"] == "request"]) == 2, "the lines")
    line = next(line for line in served.log if line.get("request_id") == "mine-1")
    assert (line["method"], line["path"], line["client"]) == ("GET", "/api/v1/streams", "127.0.0.1")
    assert line["status"] == answer.status_code
    assert "s3cret" not in served.log_file.read_text()


def test_logs_for_people(tmp_path):
    served = start(tmp_path / "served", ORDERS, "--log-format", "text")
    try:
        wait_until(lambda: "url=http://127.0.0.1:" in served.log_file.read_text(), "the line that tells the address")
    finally:
        code = served.stop()
    assert code == 0
    assert served.log == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_refuses_a_public_address_while_a_stream_is_open(project, host):
    (project / "streams.py").write_text("import weft\n" + textwrap.dedent(ORDERS))
    done = _weft("serve", "--module", "streams", "--host", host, "--port", "0")
    assert done.returncode == 1
    assert "orders" in done.stderr
    assert "weft apikey create" in done.stderr
    assert "--insecure" in done.stderr


def _weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, timeout=60)


def test_serves_a_public_address_if_told_to(server):
    served = server(ORDERS, "--host", "0.0.0.0", "--insecure")
    assert served.client.get("/api/v1/streams", headers={"host": "example.com"}).status_code == 200


def test_answers_for_this_machine_alone(server):
    """A page of a site whose name leads to this machine sends that name."""
    served = server(ORDERS)

    def get(host: str) -> int:
        return served.client.get("/api/v1/streams", headers={"host": host}).status_code

    assert get("evil.example") == get("evil.example:8080") == get("127.0.0.1.evil.example") == get("10.0.0.1") == 421
    assert get("localhost") == get("localhost:1") == get("127.0.0.1") == get("[::1]:80") == get("a.localhost") == 200


def test_a_module_that_breaks_leaves_the_others(server):
    folder = server(ORDERS).folder
    (folder / "broken.py").write_text("import weft\nraise RuntimeError('oh')\n")
    served = server(ORDERS, "--module", "broken", folder=folder)
    assert served.publish("orders", {"n": 1})["status"] == "accepted"
    answer = served.client.get(f"{PREFIX}/elsewhere")
    assert answer.status_code == 503
    assert "broken" in answer.json()["detail"]
    assert "oh" not in answer.text


def test_a_connection_that_breaks_leaves_the_others(server):
    served = server(
        ORDERS
        + """
    @weft.stream(connection="nowhere")
    def undefined(): ...

    @weft.stream(connection="away")
    def away(): ...
    """,
        toml='[connections.away]\nurl = "postgres://me:s3cret@127.0.0.1:1/nothing"\n',
    )
    for name in ("undefined", "away"):
        answer = served.client.post(f"{PREFIX}/{name}", json={"n": 1})
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["retry_after"] > 0
        assert "s3cret" not in answer.text
    assert served.publish("orders", {"n": 1})["status"] == "accepted"
    assert "s3cret" not in served.log_file.read_text()


def test_starts_while_the_default_database_is_away(server):
    """Which also has the keys: streams with a credential of their own do not need them."""
    served = server(
        """
    @weft.stream(connection="here", auth={"type": "bearer", "token": "t0ken"})
    def orders(): ...

    @weft.stream()
    def other(): ...
    """,
        toml="""
            [connections.default]
            url = "postgres://me:x@127.0.0.1:1/nothing"
            [connections.here]
            url = "sqlite:///here.db"
        """,
    )
    assert served.publish("orders", {"n": 1}, authorization="Bearer t0ken")["status"] == "accepted"
    assert served.client.post(f"{PREFIX}/other", json={"n": 1}).status_code == 503


@pytest.mark.timing
def test_a_database_that_hangs_leaves_the_others(server):
    """One that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        served = server(
            ORDERS + '\n    @weft.stream(connection="hangs")\n    def stuck(): ...\n',
            toml=f"""
                [connections.hangs]
                url = "postgres://me:x@127.0.0.1:{port}/nothing"
                [server]
                waiting_requests = 40
            """,
            constants=SOON,
        )
        with contextlib.ExitStack() as stack:
            for _ in range(40):
                connection = stack.enter_context(served.connect())
                connection.sendall(f"GET {PREFIX}/stuck HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            for n in range(20):
                served.publish("orders", {"n": n})
            assert served.client.post(f"{PREFIX}/orders/consume", json={"consumer": "c"}).json()["count"] == 20
            # More than that do not wait for it.
            refused = served.client.get(f"{PREFIX}/stuck")
            assert refused.json()["type"] == "urn:weft:problem:overloaded"
            assert refused.headers["retry-after"] == "1"
            assert served.stop() == 0


@pytest.mark.parametrize(
    ("setting", "named"),
    [("body_byte = 1", "body_bytes"), ("body_bytes = 0", "body_bytes"), ("wait_seconds = 'x'", "wait_seconds")],
)
def test_settings(project, setting, named):
    (project / "streams.py").write_text("import weft\n" + textwrap.dedent(ORDERS))
    (project / "weft.toml").write_text(f"[server]\n{setting}\n")
    done = _weft("serve", "--module", "streams", "--port", "0")
    assert done.returncode == 1
    assert named in done.stderr


def test_a_run_log_that_is_none(project):
    (project / "streams.py").write_text("import weft\n" + textwrap.dedent(ORDERS))
    done = _weft("serve", "--module", "streams", "--port", "0", "--run-log-url", "postgrs://logs/weft")
    assert done.returncode == 1
    assert "There is no run log at postgrs://" in done.stderr and "Did you mean postgres://" in done.stderr


def test_delivers_what_the_run_log_missed(server, monkeypatch):
    """A run that the page started may end while the run log is away."""
    served = server(ORDERS, constants={"weft.server.serve._SPOOL_SECONDS": 0.1})
    with open_run_log(None, served.folder) as log:
        claimed = log.claim("nightly")
        with monkeypatch.context() as patch:
            patch.setattr(log._book, "locked", None)
            assert log.finish(claimed, "succeeded")
        wait_until(lambda: log.latest(["nightly"])["nightly"].status == "succeeded", "the delivery", seconds=60)
    wait_until(lambda: not (served.folder / FILE).exists(), "the end of the spool", seconds=60)


def test_a_port_that_is_taken(server, project):
    served = server(ORDERS)
    (project / "streams.py").write_text("import weft\n" + textwrap.dedent(ORDERS))
    done = _weft("serve", "--module", "streams", "--port", str(served.port))
    assert done.returncode == 1
    assert "--port" in done.stderr


def test_refuses_streams_in_memory(project, monkeypatch):
    monkeypatch.setenv("WEFT_DSN", "sqlite://")
    (project / "streams.py").write_text("import weft\n" + textwrap.dedent(ORDERS))
    for command in (("serve", "--port", "0"), ("streams", "publish", "orders", "--data", '{"n": 1}')):
        done = _weft(*command, "--module", "streams")
        assert done.returncode == 1
        assert "in the memory of" in done.stderr
        assert "sqlite:///events.db" in done.stderr


def test_nothing_to_serve(project):
    done = _weft("serve")
    assert done.returncode == 1
    assert "--module" in done.stderr
