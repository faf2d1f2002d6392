"""The files of `docs/deploy/` fit this version: commands, manifests, rules and dashboard."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from weft.cli import cli
from weft.engine import config
from weft.operate.executors import open_executor
from weft.operate.metrics import METRICS, open_metrics

REPOSITORY = Path(__file__).parent.parent.parent
ROOT = REPOSITORY / "docs" / "deploy"
_PROMQL = re.compile(r"\bweft_[a-z_]+")


def check_command(arguments: list[str]) -> None:
    """Parse a command line as `weft` would, and refuse what it refuses; runs nothing."""
    command: Any = cli
    context = click.Context(cli, info_name="weft")
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        found = command.get_command(context, arguments[0])
        assert found is not None, arguments
        command, arguments = found, arguments[1:]
    parsed = command.make_context("weft", list(arguments), resilient_parsing=False)
    if parsed.params.get("metrics"):
        assert parsed.params["metrics"].startswith("prometheus://")
        with pytest.raises(Exception, match="no metrics sink"), open_metrics("x" + parsed.params["metrics"]):
            pass


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted((ROOT / "kubernetes").glob("*.yaml")):
        for each in yaml.safe_load_all(file.read_text()):
            yield f"{file.name} {each['kind']} {each['metadata']['name']}", each


def containers(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield from value.get("containers", ())
        for each in value.values():
            yield from containers(each)


@pytest.mark.parametrize(
    ("name", "manifest"), list(documents()), ids=lambda each: each if isinstance(each, str) else ""
)
def test_manifests(name: str, manifest: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("kubernetes.client")
    group, _, version = manifest["apiVersion"].rpartition("/")
    model = f"{version.capitalize()}{manifest['kind']}"
    api = client.ApiClient()
    read = api.deserialize(json.dumps(manifest), model, "application/json")
    assert api.sanitize_for_serialization(read) == manifest, "a field that Kubernetes does not know"
    assert group in ("", "apps", "batch", "rbac.authorization.k8s.io")
    kubeconfig = {"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}], "users": []}
    kubeconfig |= {"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "current-context": "c"}
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    for container in containers(manifest):
        arguments = container["args"]
        check_command(arguments)
        if "--executor" in arguments:
            open_executor(arguments[arguments.index("--executor") + 1])


@pytest.mark.parametrize("file", sorted((ROOT / "systemd").iterdir()), ids=lambda each: each.name)
def test_units(file: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(file.read_text())
    if unit.has_section("Service"):
        program, *arguments = shlex.split(unit["Service"]["ExecStart"])
        assert program == "/opt/weft/bin/weft"
        check_command([each.replace("%i", "clicks") for each in arguments])
        assert unit["Service"]["User"] == "weft" and unit["Service"]["NoNewPrivileges"] == "true"


SETTINGS = sorted((ROOT / "spark").glob("*.toml"))


@pytest.mark.parametrize("file", SETTINGS, ids=lambda each: each.stem)
def test_settings_of_spark(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are understood, and name no variable that nobody sets."""
    manifest = yaml.safe_load_all((ROOT / "kubernetes" / "spark.yaml").read_text())
    (deployment,) = (each for each in manifest if each["kind"] == "Deployment")
    (container,) = containers(deployment)
    given = {each["name"] for each in container["env"]} if file.stem == "kubernetes" else {"DRIVER_HOST"}
    for name in given:
        monkeypatch.setenv(name, "10.0.0.7")
    monkeypatch.delenv("WEFT_SPARK_MASTER", raising=False)
    (tmp_path / "weft.toml").write_text(file.read_text())
    settings = config.read_settings(tmp_path)
    assert not settings.is_local
    conf = config.session_conf(settings)
    assert conf["spark.master"] == settings.master
    assert not [value for value in conf.values() if "${" in value]


def known_metrics() -> set[str]:
    """The names that this version exports, as its sources declare them."""
    names = {f"{each.name}_total" if each.kind == "counter" else each.name for each in METRICS}
    source = REPOSITORY / "src" / "weft"
    server = (source / "server" / "metrics.py").read_text()
    for name in re.findall(r'counter\(\s*"(weft_\w+)"', server):
        names.add(f"{name}_total")
    for name in re.findall(r'"(weft_\w+)"', server):
        names |= {name, f"{name}_bucket"}
    streaming = (source / "operate" / "streaming_metrics.py").read_text()
    for name in re.findall(r'counter\(\s*"(\w+)"', streaming):
        names.add(f"weft_streaming_{name}_total")
    for name in re.findall(r'_PREFIX\}_(\w+)"', streaming):
        names |= {f"weft_streaming_{name}", f"weft_streaming_{name}_bucket"}
    return names


def test_rules() -> None:
    (group,) = yaml.safe_load((ROOT / "prometheus" / "rules.yaml").read_text())["groups"]
    known = known_metrics()
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(_PROMQL.findall(rule["expr"])) <= known, rule["alert"]
        # Where nothing is scraped there is no sum, which no number is greater than.
        assert not rule["expr"].startswith("sum("), rule["alert"]
        command = rule["annotations"].get("what_to_do")
        if command is not None:
            program, *arguments = shlex.split(re.sub(r"\{\{.*?\}\}", "orders", command))
            assert program == "weft"
            check_command(arguments)


def test_dashboard() -> None:
    dashboard = json.loads((ROOT / "grafana" / "weft.json").read_text())
    known = known_metrics()
    places = [tuple(each["gridPos"][at] for at in "xy") for each in dashboard["panels"]]
    assert len(set(places)) == len(places)
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            used = set(_PROMQL.findall(target["expr"]))
            assert used and used <= known, panel["title"]


def test_the_container_runs_without_rights() -> None:
    lines = [line.split(maxsplit=1) for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1].isupper()]
    words = [word for word, _ in lines]
    assert set(words) <= {"FROM", "RUN", "COPY", "WORKDIR", "USER", "ENV", "ENTRYPOINT", "CMD"}
    assert ["USER", "10001"] in lines and words.index("USER") < words.index("ENTRYPOINT")
    # Else it belongs to root, and the project cannot make its folder .weft in it.
    (makes,) = (at for at, (word, rest) in enumerate(lines) if word == "RUN" and "--owner weft /project" in rest)
    assert makes < lines.index(["WORKDIR", "/project"])
    values = {word: rest for word, rest in lines if word in ("ENTRYPOINT", "CMD")}
    assert json.loads(values["ENTRYPOINT"]) == ["weft"]
    check_command(json.loads(values["CMD"]))


def test_the_function() -> None:
    lines = [line.split(maxsplit=1) for line in (ROOT / "lambda" / "Dockerfile").read_text().splitlines()]
    values = {each[0]: each[1] for each in lines if each[0].isupper()}
    assert values["FROM"].endswith("/lambda/python:3.11")
    (handler,) = json.loads(values["CMD"])
    module, _, name = handler.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    (extras,) = re.findall(r"\[([a-z,0-9-]+)\]", values["RUN"])
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= declared.keys()


@pytest.mark.full
def test_the_steps_of_the_container(tmp_path: Path) -> None:
    """What its RUN lines do, in a folder: a wheel is built and installed into an environment of its own."""
    python = REPOSITORY / ".venv" / "bin" / "python"
    wheel = [
        str(python),
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(REPOSITORY),
    ]
    subprocess.run(wheel, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    subprocess.run([str(python), "-m", "venv", str(tmp_path / "weft")], check=True)
    subprocess.run([str(tmp_path / "weft" / "bin" / "pip"), "install", "-q", str(built)], check=True)
    done = subprocess.run([str(tmp_path / "weft" / "bin" / "weft"), "--version"], check=True, capture_output=True)
    assert done.stdout.startswith(b"weft ")
