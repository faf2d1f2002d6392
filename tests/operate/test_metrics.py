"""What is counted of runs, and the sinks that get it."""

from __future__ import annotations

from pathlib import Path
from urllib.request import urlopen

import pytest

import servers
import weft
from collector import collector
from weft.errors import ConnectionFailedError, NotFoundError, SettingsError
from weft.operate import metrics, sinks
from weft.operate.metrics import METRICS, Metrics, open_metrics


def count_two(counted: Metrics) -> None:
    counted.ended("orders", "failed", 1, 0, 2.0, {"rows_read": 3})
    counted.ended("orders", "succeeded", 2, 1, 0.5, {"rows_read": 3, "inserted": 2})


def test_values() -> None:
    counted = Metrics()
    count_two(counted)
    assert counted.value("weft_pipeline_runs_total", pipeline="orders", status="failed") == 1
    assert counted.value("weft_pipeline_rows_total", pipeline="orders", kind="read") == 6
    assert counted.value("weft_pipeline_run_seconds_total", pipeline="orders") == 2.5
    assert counted.value("weft_pipeline_attempt", pipeline="orders") == 2
    assert counted.value("weft_pipeline_failures", pipeline="orders") == 0
    assert counted.value("weft_pipeline_failures", pipeline="others") is None
    with pytest.raises(NotFoundError, match="Did you mean 'weft_pipeline_runs'"):
        counted.value("weft_pipeline_run")


def test_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with open_metrics("stdout://") as counted:
        counted.ended('a"b\n', "succeeded", 1, 0, 0.25, {})
        assert capsys.readouterr().out == ""
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == 'weft_pipeline_runs_total{pipeline="a\\"b\\n",status="succeeded"} 1'
    assert second == 'weft_pipeline_run_seconds_total{pipeline="a\\"b\\n"} 0.25'


def test_prometheus() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    port = servers.free_port()
    with open_metrics(f"prometheus://127.0.0.1:{port}") as counted:
        count_two(counted)
        counted.set(metrics.LEADS, True)
        text = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        taken = f"prometheus://127.0.0.1:{port}"
        with pytest.raises(ConnectionFailedError, match=f"port {port}"), open_metrics(taken, must_serve=True):
            pass
        with open_metrics(taken) as other:  # a run goes on without
            count_two(other)
    families = {each.name: each for each in text_string_to_metric_families(text)}
    assert families.keys() == {each.name for each in METRICS}
    (runs,) = (each for each in families["weft_pipeline_runs"].samples if each.labels["status"] == "succeeded")
    assert (runs.labels["pipeline"], runs.value) == ("orders", 1)
    assert [each.value for each in families["weft_scheduler_leads"].samples] == [1]


def test_otlp() -> None:
    with collector() as collected:
        with open_metrics(collected.url) as counted:
            count_two(counted)
        path, sent = collected.received[-1]
    assert path == "/v1/metrics"
    (resource,) = sent.resource_metrics
    assert [each.value.string_value for each in resource.resource.attributes if each.key == "service.name"] == ["weft"]
    found = {each.name: each for each in resource.scope_metrics[0].metrics}
    points = {
        tuple(sorted((label.key, label.value.string_value) for label in point.attributes)): point.as_double
        or point.as_int
        for point in found["weft_pipeline_rows"].sum.data_points
    }
    assert points == {
        (("kind", "inserted"), ("pipeline", "orders")): 2,
        (("kind", "read"), ("pipeline", "orders")): 6,
    }
    assert found["weft_pipeline_rows"].sum.is_monotonic
    assert found["weft_pipeline_attempt"].gauge.data_points[0].as_int == 2


def test_a_collector_that_is_away_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with open_metrics(f"otlp://127.0.0.1:{servers.free_port()}") as counted:
        count_two(counted)


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("prometeus://:9100", NotFoundError, r"no metrics sink prometeus://[\s\S]*'prometheus'"),
        ("prometheus://localhost", SettingsError, "needs a port"),
        ("prometheus://:port", SettingsError, "cannot be read"),
        ("otlp://", SettingsError, "needs the host"),
        ("otlp://me:hunter2@host", SettingsError, "too much in it"),
        ("memory://x", SettingsError, "too much in it"),
        ("metrics", NotFoundError, "needs a URL"),
    ],
)
def test_refused(url: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught, open_metrics(url):
        pass
    assert "hunter2" not in str(caught.value)


def test_a_port_of_the_project_is_not_for_what_can_be_scraped(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, collected = "prometheus://:9100", "otlp://collector:4318"
    (project / "weft.toml").write_text(f'metrics = "{port}"\n')
    assert sinks.project_url() == port
    assert sinks.url_beside_scrapes() is None
    assert sinks.url_beside_scrapes(port) == port
    monkeypatch.setenv(sinks.VARIABLE, "prometheus://:9200")
    assert sinks.url_beside_scrapes() is None
    monkeypatch.setenv(sinks.VARIABLE, collected)
    assert sinks.url_beside_scrapes() == collected


def test_a_run_is_counted(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.cli.pipelines import open_runner

    monkeypatch.setattr(metrics, "MEMORY", Metrics())
    fails = iter([True, False])

    @weft.pipeline(target="numbers")
    def load() -> list[dict[str, int]]:
        if next(fails):
            raise ValueError("no")
        return [{"n": 1}, {"n": 2}]

    with open_runner("memory://", (), "memory://") as runner:
        assert [runner.run(load).status for _ in range(2)] == ["failed", "succeeded"]
    found = metrics.MEMORY
    assert found.value("weft_pipeline_runs_total", pipeline="load", status="failed") == 1
    assert found.value("weft_pipeline_rows_total", pipeline="load", kind="inserted") == 2
    assert found.value("weft_pipeline_attempt", pipeline="load") == 2
    assert found.value("weft_pipeline_failures", pipeline="load") == 0
