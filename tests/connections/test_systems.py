"""Systems are found by kind and by URL, and installed packages add theirs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from weft import DeclarationError
from weft.systems import System, system_for, system_for_url


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("sqlite:///a.db", "sqlite"),
        ("postgres://h", "postgres"),
        ("postgresql://h", "postgres"),
        ("POSTGRES://h", "postgres"),
        ("mysql://h", "mysql"),
        ("mariadb://h", "mysql"),
    ],
)
def test_scheme_says_the_kind(url: str, kind: str) -> None:
    system = system_for_url(url)
    assert system is system_for(kind)
    assert system.load_connection().kind == kind


def test_system_without_a_log_says_who_has_one() -> None:
    with pytest.raises(DeclarationError, match=r"cannot hold a stream[\s\S]*sqlite, postgres, mysql"):
        System(kind="paper", connection="x:Y").load_log()


@pytest.fixture
def python(project: Path):
    """Runs a program that sees packages which were laid into the folder `site` by `install`."""

    def run(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", f"import sys\nsys.path.insert(0, 'site')\n{textwrap.dedent(program)}"],
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def install(package: str, entry_points: dict[str, str], source: str) -> None:
    info = Path(f"site/{package.replace('-', '_')}-1.0.dist-info")
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    points = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[weft.systems]\n{points}")
    Path(f"site/{package.replace('-', '_')}.py").write_text(textwrap.dedent(source))


PAPER = """
    from dataclasses import dataclass, field
    from weft.systems import Connection, System

    @dataclass(frozen=True)
    class PaperConnection(Connection):
        kind = "paper"
        url: str = field(metadata={"url": True})

    system = System(kind="paper", connection="weft_paper:PaperConnection", schemes=("paper",))
    clash = System(kind="sqlite", connection="weft_paper:PaperConnection", schemes=("sqlite",))
"""


def test_package_adds_a_system(python) -> None:
    install("weft-paper", {"paper": "weft_paper:system"}, PAPER)
    done = python(
        """
        import weft
        print(weft.connect("paper://me:hunter2@desk"), weft.connect(kind="paper", url="paper://desk"))
        """
    )
    assert done.stderr == ""
    assert done.stdout == "PaperConnection(url='paper://me:***@desk') PaperConnection(url='paper://desk')\n"


def test_broken_and_clashing_packages_are_named_and_break_nothing(python) -> None:
    install("weft-paper", {"paper": "weft_paper:system", "sqlite": "weft_paper:clash"}, PAPER)
    install("weft-broken", {"stone": "weft_broken:system", "sand": "weft_paper:PaperConnection"}, "import not_there")
    done = python(
        """
        import weft
        print(weft.connect("sqlite:///a.db"), weft.connect("paper://desk"))
        try:
            weft.connect(kind="stone")
        except weft.SettingsError as error:
            print(error)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SQLiteConnection(url='sqlite:///a.db') PaperConnection(url='paper://desk')\n")
    assert "The system 'stone' of the package weft-broken does not load: ModuleNotFoundError" in done.stdout
    assert "The system 'stone' of the package weft-broken does not load" in done.stderr
    assert "The system 'sand' of the package weft-broken is a type, not a weft.systems.System" in done.stderr
    assert "The system 'sqlite' of the package weft-paper has the kind 'sqlite', which is taken" in done.stderr


def test_missing_package_names_the_extra(python) -> None:
    done = python(
        """
        for package in ("psycopg", "pymysql", "pika", "boto3", "google.api_core"):
            sys.modules[package] = None  # as if it were not installed
        import weft
        for connection in (
            weft.connect("postgres://h"),
            weft.connect("mysql://h"),
            weft.connect("amqp://h"),
            weft.KinesisConnection(region="eu-west-1"),
            weft.PubSubConnection(project_id="p"),
        ):
            try:
                connection.check()
            except weft.MissingExtraError as error:
                print(error)
        """
    )
    for kind in ("postgres", "mysql", "rabbitmq", "kinesis", "pubsub"):
        assert f"pip install 'weft[{kind}]', or in a clone of its repository: pip install '.[{kind}]'" in done.stdout
        assert f"The {kind} system needs a package" in done.stdout
