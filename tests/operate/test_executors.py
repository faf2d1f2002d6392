"""Runs that Kubernetes and Lambda start, as their APIs see them, and what makes a run one on a cluster of Spark's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import servers
from servers import wait_until
from weft.cli.lambda_handler import handler
from weft.engine import config
from weft.errors import ConnectionFailedError, NotFoundError, SettingsError
from weft.operate.executors import Dispatch, open_executor
from weft.operate.kubernetes_executor import job_name, label_value
from weft.operate.runlog import open_run_log

RUN = Dispatch("load_orders", ("shop",), "postgres://flow:hunter2@db/history", ("stdout://",))


class Api:
    """An HTTP server that answers as the test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.jobs: dict[str, Any] = {}
        self.refuses: tuple[int, str] | None = None
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.asked.append(("POST", self.path, dict(self.headers), body))
                self.answer(*api.post(self.path, body))

            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                found = api.jobs.get(name)
                self.answer(*((404, {"message": "not found"}) if found is None else (200, found)))

            def answer(self, code: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        if self.refuses is not None:
            code, message = self.refuses
            return code, {"kind": "Status", "message": message}
        if "/invocations" in path:
            return 202, {}
        assert path == f"/apis/batch/v1/namespaces/{body['metadata']['namespace']}/jobs"
        assert known_to_kubernetes(body) == body
        self.jobs[body["metadata"]["name"]] = {**body, "status": {"active": 1}}
        return 201, body


def known_to_kubernetes(manifest: dict[str, Any]) -> Any:
    """What is left of a Job after Kubernetes' own model has read it: unknown fields are gone, wrong types an error."""
    from kubernetes.client import ApiClient

    client = ApiClient()
    read: Any = client.deserialize(json.dumps(manifest), "V1Job", "application/json")
    return client.sanitize_for_serialization(read)


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture
def cluster(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": api.url}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return api


def test_a_job(cluster: Api) -> None:
    executor = open_executor(
        "k8s://flow?image=my-registry/flow:latest&service-account=flow&env-from-secret=dsn&cpu=500m&memory=1Gi"
    )
    started = executor.start(RUN)
    ((_, _, _, job),) = cluster.asked
    assert job["spec"]["backoffLimit"] == 0 and job["spec"]["ttlSecondsAfterFinished"] == 3600
    pod = job["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["serviceAccountName"]) == ("Never", "flow")
    (container,) = pod["containers"]
    assert container["image"] == "my-registry/flow:latest"
    assert [*container["command"], *container["args"]] == ["weft", "run-due", "load_orders", "--module", "shop"]
    assert {each["name"]: each["value"] for each in container["env"]} == RUN.environment
    assert container["envFrom"] == [{"secretRef": {"name": "dsn"}}]
    assert container["resources"]["limits"] == {"cpu": "500m", "memory": "1Gi"}
    assert job["metadata"]["labels"]["weft.dev/pipeline"] == "load_orders"

    assert started.ended() is None
    (stored,) = cluster.jobs.values()
    stored["status"] = {"failed": 1}
    assert started.ended() == 1
    stored["status"] = {"succeeded": 1}
    assert started.ended() == 0
    cluster.jobs.clear()
    assert started.ended() == 0


def test_a_job_with_executors_of_spark(cluster: Api) -> None:
    open_executor("k8s://flow?image=shop:1&service-account=flow&spark-executors=3&spark-image=spark:1").start(RUN)
    ((_, _, _, job),) = cluster.asked
    (container,) = job["spec"]["template"]["spec"]["containers"]
    names = [each["name"] for each in container["env"]]
    assert names[-4:] == ["WEFT_POD", "WEFT_POD_IP", "WEFT_SPARK_MASTER", "WEFT_SPARK_CONF"]
    assert [each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"][-4:-2]] == [
        "metadata.name",
        "status.podIP",
    ]
    conf = json.loads(container["env"][-1]["value"])
    assert conf["spark.executor.instances"] == "3"
    assert conf["spark.kubernetes.container.image"] == "spark:1"
    assert conf["spark.driver.host"] == "$(WEFT_POD_IP)"


def test_a_run_on_a_cluster_of_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    executor: Any = open_executor(
        "spark://one:7077,two:7077?cores=8&executor-memory=4g&executor-cores=2&python=/opt/python"
    )
    for name, value in executor.environment(RUN).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "weft.toml").write_text(
        '[spark]\nmaster = "local[2]"\n[spark.conf]\nspark.executor.memory = "1g"\nspark.task.cpus = 2'
    )
    settings = config.read_settings(tmp_path)
    assert settings.master == "spark://one:7077,two:7077"
    assert settings.conf == {
        "spark.app.name": "weft load_orders",
        "spark.cores.max": "8",
        "spark.executor.cores": "2",
        "spark.executor.memory": "4g",
        "spark.pyspark.python": "/opt/python",
        "spark.task.cpus": "2",
    }


def test_names_of_jobs() -> None:
    for name in ("load_orders", "Ä/ö", "x" * 300, "--", "raw.events → lake"):
        made = job_name(name)
        assert len(made) <= 63 and made.startswith("weft-") and made.replace("-", "").isalnum() and made.isascii()
        assert len(label_value(name)) <= 63 and not label_value(name).startswith("-")
    assert job_name("a") != job_name("a")


def test_what_a_cluster_refuses(cluster: Api) -> None:
    executor = open_executor("k8s://flow?image=x")
    cluster.refuses = (403, 'jobs.batch is forbidden: User "me" cannot create resource "jobs"')
    with pytest.raises(ConnectionFailedError, match=r"Job of load_orders: 403 .*cannot create resource") as caught:
        executor.start(RUN)
    assert "hunter2" not in str(caught.value)


def test_a_cluster_that_is_away(cluster: Api, tmp_path: Path) -> None:
    config = (tmp_path / "kubeconfig").read_text()
    (tmp_path / "kubeconfig").write_text(config.replace(cluster.url, f"http://127.0.0.1:{servers.free_port()}"))
    with pytest.raises(ConnectionFailedError, match="does not answer"):
        open_executor("k8s://flow?image=x").start(RUN)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("k8s://flow", "a namespace and an image"),
        ("k8s://?image=x", "a namespace and an image"),
        ("k8s://flow?image=x&service_account=y", r"no option 'service_account'[\s\S]*'service-account'"),
        ("k8s://flow?image=x&ttl-seconds=soon", "whole number"),
        ("k8s://flow?image=x&spark-executors=many", "whole number"),
        ("k8s://flow?image=x&spark-executors=3", "needs spark-image"),
        ("spark://", "not understood"),
        ("spark://host", "not understood"),
        ("spark://host:7077?core=2", r"no option 'core'[\s\S]*'cores'"),
        ("spark://host:7077?cores=0", "whole number"),
        ("spark://host:7077?executor-memory=lots", "a size such as"),
        ("lambda://", "name of a function"),
        ("lambda://f?qualifer=live", r"no option 'qualifer'[\s\S]*'qualifier'"),
    ],
)
def test_refused(url: str, says: str, cluster: Api) -> None:
    with pytest.raises(SettingsError, match=says):
        open_executor(url)


def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(SettingsError, match="No cluster of Kubernetes is configured"):
        open_executor("k8s://flow?image=x")


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")


def test_a_call_of_lambda(api: Api, aws: None) -> None:
    executor = open_executor(f"lambda://run-pipelines?qualifier=live&region=eu-west-1&endpoint={api.url}")
    assert executor.start(RUN).ended() is None
    ((_, path, headers, event),) = api.asked
    asked = urlsplit(path)
    assert asked.path.endswith("/functions/run-pipelines/invocations")
    assert parse_qs(asked.query) == {"Qualifier": ["live"]}
    assert headers["X-Amz-Invocation-Type"] == "Event"
    assert event == {"arguments": RUN.arguments, "environment": RUN.environment}


def test_a_function_that_is_not_there(s3: Any, aws: None) -> None:
    """Asked of moto's Lambda."""
    executor = open_executor(f"lambda://nothing?region=eu-west-1&endpoint={s3.endpoint}")
    with pytest.raises(ConnectionFailedError, match=r"did not take the run of load_orders: .*Function not found"):
        executor.start(RUN)


def test_what_the_function_does(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "nightly.py").write_text(
        "import weft\n@weft.pipeline(target='numbers', schedule='* * * * *')\ndef load():\n    return [{'n': 1}]\n"
    )
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("WEFT_RUN_LOG", "")
    event = {
        "arguments": ["run-due", "load", "--module", "nightly"],
        "environment": {"WEFT_RUN_LOG": "sqlite://elsewhere.db", "TRACEPARENT": "of this call"},
    }
    assert handler(event) == {"code": 0}
    assert (os.environ["WEFT_RUN_LOG"], os.environ.get("TRACEPARENT")) == ("", None)
    with open_run_log("sqlite://elsewhere.db") as log:
        assert [(each.pipeline, each.status) for each in log.runs()] == [("load", "succeeded")]
    assert handler({**event, "arguments": ["run-due", "nothing", "--module", "nightly"]}) == {"code": 1}
    with pytest.raises(SettingsError, match="must have the arguments"):
        handler({"arguments": ["serve"]})


@pytest.mark.timing
def test_the_guides_scheduler(cluster: Api, project: Path, shared_server: Any) -> None:
    """As written there, with our name in place of theirs."""
    (project / "my_app").mkdir()
    (project / "my_app" / "__init__.py").write_text("")
    (project / "my_app" / "pipelines.py").write_text(
        "import weft\n@weft.pipeline(target='numbers', schedule='* * * * *')\ndef load_numbers():\n    return []\n"
    )
    port = servers.free_port()
    with shared_server("postgres").database() as url:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "weft", "scheduler", "--module", "my_app.pipelines"),
                *("--executor", "k8s://flow?image=my-registry/flow:latest&service-account=flow"),
                *("--run-log-url", url),
                *("--metrics", f"prometheus://:{port}", "--poll-interval", "10", "--lease-seconds", "300"),
            ],
            cwd=project,
            env={**os.environ, "WEFT_ALERTERS": "http://hooks/hunter2"},
        )
        try:
            wait_until(lambda: bool(cluster.asked), "a Job")
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    (_, _, _, job), *_ = cluster.asked
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["run-due", "load_numbers", "--module", "my_app.pipelines"]
    assert "hunter2" not in json.dumps(job)


def test_executors_by_url() -> None:
    assert Dispatch("orders", ("shop",), "postgres://me:x@db", ("slack://a",)).arguments == [
        "run-due",
        "orders",
        "--module",
        "shop",
    ]
    with pytest.raises(NotFoundError, match="There is no executor 'k9s'"):
        open_executor("k9s://x")
    with pytest.raises(SettingsError, match="takes nothing behind it"):
        open_executor("subprocess+python://x")
