"""A name leads to the first source that defines it."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft import DeclarationError, NotFoundError, SettingsError, SQLiteConnection, get_connection, register_connection
from weft.project import Project, use
from weft.systems import Connection


def table(name: str, path: str) -> str:
    return f'[connections.{name}]\nurl = "sqlite:///{path}"\n'


@pytest.fixture(params=["default", "warehouse"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_order(name: str, project: Path, fresh: Project, write_settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source that is added in turn wins over those before it, and says what it shadows."""
    seen: list[str] = []

    def wins(source: str, path: str) -> None:
        connection = get_connection(name)
        assert connection.name == name
        assert connection.resolved().path == str(project / path)
        found = fresh.where(name)
        assert (found.source, found.shadows) == (source, tuple(reversed(seen)))
        assert found.kind == "sqlite"
        seen.append(source)

    if name == "default":
        wins("built in", ".weft/weft.db")
    register_connection(SQLiteConnection("code.db", name=name))
    wins("code", "code.db")
    write_settings(user=table(name, "user.db"))
    wins("~/.weft/connections.toml", "user.db")
    write_settings(table(name, "project.db"))
    wins("weft.toml", "project.db")
    if name == "default":
        monkeypatch.setenv("WEFT_DSN", "sqlite:///dsn.db")
        wins("env WEFT_DSN", "dsn.db")
    monkeypatch.setenv(f"WEFT_DSN_{name.upper()}", "sqlite:///own.db")
    wins(f"env WEFT_DSN_{name.upper()}", "own.db")


def test_plain_variable_is_for_default_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN", "sqlite:///dsn.db")
    with pytest.raises(NotFoundError):
        get_connection("warehouse")


def test_name_is_spelled_for_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN_MY_WARE_HOUSE2", "sqlite:///a.db")
    assert get_connection("my-ware.house2").resolved().path == get_connection("my_ware_house2").resolved().path


def test_none_is_default_and_a_connection_is_itself(project: Path, fresh: Project) -> None:
    assert fresh.connection(None) == fresh.connection("default")
    inline = SQLiteConnection("a.db")
    assert fresh.connection(inline) is inline


def test_root_of_a_project_takes_the_place_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/weft.toml").write_text(table("a", "a.db"))
    with use(Project(tmp_path / "other")):
        assert get_connection("default").path == str(tmp_path / "other/.weft/weft.db")
        assert get_connection("a").url == "sqlite:///a.db"
    with pytest.raises(NotFoundError):
        get_connection("a")


def test_kind_and_fields_of_a_file(write_settings, monkeypatch: pytest.MonkeyPatch) -> None:
    write_settings(
        """
        [connections.file]
        kind = "sqlite"
        path = "a.db"
        [connections.warehouse]
        url = "postgres://${WAREHOUSE_DSN}"
        [connections.hidden]
        url = "${HIDDEN_DSN}"
        """
    )
    assert get_connection("file") == SQLiteConnection("a.db", name="file")
    assert get_connection("warehouse").kind == "postgres"
    monkeypatch.setenv("HIDDEN_DSN", "mysql://me:hunter2@host")
    assert repr(get_connection("hidden")) == "MySQLConnection(name='hidden', url='${HIDDEN_DSN}')"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("url = 1", DeclarationError, r"weft\.toml, \[connections\.x\]: url must be a string"),
        ("kind = 1", DeclarationError, "kind must be a string"),
        ("", DeclarationError, "url or kind is missing"),
        ('url = ""', DeclarationError, "url is empty"),
        ('url = "hunter2"', SettingsError, "must begin with a scheme"),
        ('url = "pulsar://h"', NotFoundError, r"URLs that begin with pulsar://[\s\S]*Known schemes: .*postgres"),
        ('kind = "pulsar"', NotFoundError, r"no kind .* 'pulsar'[\s\S]*Known kinds: .*mysql.*postgres.*sqlite"),
        ('kind = "postgers"', NotFoundError, r"Did you mean 'postgres'\?"),
        ('kind = "postgres"', DeclarationError, "needs the field 'url'"),
        ('kind = "sqlite"\npth = "a"', DeclarationError, r"no field 'pth'[\s\S]*Did you mean 'path'\?"),
        ('kind = "postgres"\nurl = "mysql://h"', DeclarationError, "begins with mysql://"),
        ('url = "${NOT_SET}"', SettingsError, r"NOT_SET is not set.*'x'[\s\S]*state the kind"),
    ],
)
def test_mistake_in_a_file_names_the_place(write_settings, fresh: Project, text: str, error, message: str) -> None:
    write_settings(f"[connections.x]\n{text}\n")
    with pytest.raises(error, match=message) as caught:
        get_connection("x")
    assert "weft.toml, [connections.x]" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert fresh.where("x").problem == caught.value.what


def test_mistake_in_one_connection_does_not_hide_the_others(write_settings, fresh: Project) -> None:
    write_settings('[connections.bad]\nkind = "pulsar"\n' + table("good", "a.db"))
    shown = {each.name: (each.kind, each.problem is not None) for each in fresh.describe_connections()}
    assert shown == {"bad": (None, True), "default": ("sqlite", False), "good": ("sqlite", False)}


def test_empty_variable_is_an_error_not_another_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN", "")
    with pytest.raises(DeclarationError, match="WEFT_DSN: url is empty"):
        get_connection("default")


def test_unknown_name_is_answered_with_the_nearest_and_the_command(write_settings) -> None:
    write_settings(table("warehouse", "a.db"))
    with pytest.raises(NotFoundError) as caught:
        get_connection("warehose")
    assert "'warehose'" in str(caught.value)
    assert "Did you mean 'warehouse'?" in str(caught.value)
    assert "weft connections set warehose=DSN" in str(caught.value)


def test_url_in_the_place_of_a_name_is_not_shown() -> None:
    with pytest.raises(NotFoundError, match=r"weft\.connect\(url=") as caught:
        get_connection("postgres://me:hunter2@host")
    assert "hunter2" not in str(caught.value)


def test_listing_has_every_name_once_and_no_secret(
    fresh: Project, write_settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(table("my-app", "a.db"), user='[connections.b]\nurl = "postgres://me:hunter2@h/db"\n')
    monkeypatch.setenv("WEFT_DSN_MY_APP", "sqlite:///b.db")
    monkeypatch.setenv("WEFT_DSN_ALONE", "mysql://me:hunter2@h/db")
    register_connection(SQLiteConnection("c.db", name="c"))
    listed = {each.name: (each.kind, each.target, each.source) for each in fresh.describe_connections()}
    assert listed == {
        "alone": ("mysql", "mysql://me:***@h/db", "env WEFT_DSN_ALONE"),
        "b": ("postgres", "postgres://me:***@h/db", "~/.weft/connections.toml"),
        "c": ("sqlite", "c.db", "code"),
        "default": ("sqlite", str(Path.cwd() / ".weft/weft.db"), "built in"),
        "my-app": ("sqlite", "sqlite:///b.db", "env WEFT_DSN_MY_APP"),
    }


@pytest.mark.parametrize("wrong", [1, b"x", object()])
def test_what_is_no_name_is_refused(fresh: Project, wrong: Connection) -> None:
    with pytest.raises(DeclarationError, match="name is needed"):
        fresh.connection(wrong)


def test_a_connection_that_is_passed_itself(
    name: str, project: Path, fresh: Project, write_settings, monkeypatch
) -> None:
    """It is what was registered in code: the environment and the files win over it, as for its name."""
    warehouse = register_connection(SQLiteConnection("code.db", name=name))
    unregistered = SQLiteConnection("code.db", name=f"{name}2")
    unnamed = SQLiteConnection("code.db")

    def leads_to(path: str) -> bool:
        return {each.resolved().path for each in (fresh.connection(warehouse), get_connection(name))} == {
            str(project / path)
        }

    assert leads_to("code.db")
    write_settings(table(name, "project.db"))
    assert leads_to("project.db")
    monkeypatch.setenv(f"WEFT_DSN_{name.upper()}", "sqlite:///own.db")
    assert leads_to("own.db")
    assert fresh.connection(unregistered) is unregistered
    monkeypatch.setenv(f"WEFT_DSN_{name.upper()}2", "sqlite:///own2.db")
    assert fresh.connection(unregistered).resolved().path == str(project / "own2.db")
    assert fresh.connection(unnamed) is unnamed
