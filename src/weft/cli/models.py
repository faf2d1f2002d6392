"""`weft models list | show | graph`: what models are built of, and how each stands. None of them changes anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import ago, common_options, find_declared, module_option, none_declared, print_json, print_table
from weft.operate.redaction import clean
from weft.streams.events import with_texts

if TYPE_CHECKING:
    from weft.engine.models.survey import InputStatus, ModelStatus
    from weft.pipelines.models import Model


def declared_models() -> dict[str, Model]:
    """Return the declared models by name, each after those that it reads; raise where there are none."""
    from weft.pipelines import graph
    from weft.pipelines.models import models

    known = models()
    if not known:
        raise none_declared("model")
    return {each.name: known[each.name] for each in graph.in_order(known)}


@click.group()
def models() -> None:
    """List and show models, and draw what they are built of."""


@models.command("list")
@common_options
def list_(output: str) -> None:
    """List the models: what each is built of, when it was built, and whether it is stale."""
    from weft.engine.models.inputs import Observer
    from weft.engine.models.survey import Survey

    known = declared_models()
    with Observer() as observer:
        survey = Survey(observer)
        rows = [_listed(survey.status(each)) for each in known.values()]
    if output == "json":
        print_json(rows)
        return
    shown = [{**row, "last_build": ago(row["last_build"])} for row in rows]
    columns = ["model", "materialise", "table", "inputs", "trigger", "last_build", "rows", "state", "why"]
    print_table(shown, columns, spare=["trigger", "table"], below="why")


def _listed(status: ModelStatus) -> dict[str, Any]:
    model = status.model
    return {
        "model": model.name,
        "materialise": model.materialise,
        "table": model.target.name,
        "inputs": [each.name for each in model.inputs],
        "trigger": model.trigger,
        "last_build": status.built_at,
        "rows": status.rows,
        "state": status.state,
        "why": clean(status.why) or None,
    }


# ----------------------------------------------------------------------------------------------------------------- show


@models.command()
@click.argument("name")
@common_options
def show(name: str, output: str) -> None:
    """Show the model NAME: its options, inputs, columns and where they come from, its SQL and its dependents."""
    from weft.engine.models.inputs import Observer
    from weft.engine.models.survey import Survey
    from weft.pipelines.models import dependents, find

    model = find_declared(find, name)
    with Observer() as observer:
        survey = Survey(observer)
        status, query = survey.status(model), survey.described(model)
        shown = {
            **_listed(status),
            "declared": model.declared_at,
            "description": model.description,
            "owner": model.owner,
            "tags": list(model.tags),
            "options": {key: _option(value) for key, value in model.options.items()},
            "inputs": [{**vars(each), "read": _mark(each.read), "now": _mark(each.now)} for each in status.inputs],
            "left_out": status.left_out,
            "dependents": dependents([model.name, model.target.name], declared_models()),
            **query,
            "problem": query["problem"] and clean(query["problem"]),
        }
    if output == "json":
        print_json(shown)
    else:
        _print_model(model, status, shown)


def _option(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | list | tuple) or value is None else str(value)


def _print_model(model: Model, status: ModelStatus, shown: dict[str, Any]) -> None:
    where = {
        "pushdown": "inside the database",
        "spark": "on Spark",
        "python": "its function makes a frame, which has no SQL and no lineage",
        None: "not known",
    }
    by = f" by {', '.join(model.target.options['keys'])}" if model.target.options.get("keys") else ""
    click.echo(f"{click.style(model.name, bold=True)} → {model.target.name} ({model.materialise}{by})")
    lines = {
        "": model.description,
        "declared": model.declared_at,
        "owner": model.owner,
        "tags": ", ".join(model.tags),
        "trigger": model.trigger,
        "schedule": model.schedule and model.schedule.cron,
        "last build": ago(status.built_at) or "never",
        "rows": None if status.rows is None else f"{status.rows:,}",
        "state": ": ".join(filter(None, (status.state, shown["why"]))),
        "runs": where[shown["engine"]],
        "dependents": ", ".join(shown["dependents"]) or "none",
    }
    for title, text in lines.items():
        if text:
            click.echo(f"  {f'{title:<11} ' if title else ''}{text}")
    if status.inputs:
        click.echo(click.style("\nInputs", bold=True))
        rows = [{"input": each.name, "kind": each.kind, **_marks(each)} for each in status.inputs]
        print_table(rows, ["input", "kind", "read", "now", "new"], seldom=["new"])
    for line in shown["left_out"]:
        click.echo(f"  {click.style('warning:', fg='yellow')} {line}")
    if shown["columns"]:
        click.echo(click.style("\nColumns", bold=True))
        print_table(shown["columns"], ["column", "type", "comes_from"], seldom=["comes_from", "type"])
    if shown["sql"]:
        click.echo(click.style("\nSQL", bold=True))
        click.echo("  " + shown["sql"].replace("\n", "\n  "))
    if shown["problem"]:
        click.echo(f"\n{click.style('problem:', fg='red', bold=True)} {shown['problem']}")


def _mark(mark: Any) -> Any:
    """Return what is read of an input, the offset of a stream as a text too."""
    return with_texts(dict(mark), "upto") if isinstance(mark, dict) and "upto" in mark else mark


def _marks(each: InputStatus) -> dict[str, str | None]:
    def text(mark: Any) -> str | None:
        if not isinstance(mark, dict):
            return None
        if "upto" in mark:
            return f"offset {mark['upto']:,}"
        if str(mark.get("loads", "-")).partition(" ")[0] in ("", "0"):  # as the ledger says it
            return "never loaded"
        return "; ".join(f"{name} {value if not isinstance(value, dict) else '…'}" for name, value in mark.items())

    return {"read": text(each.read), "now": text(each.now), "new": each.new}


# ---------------------------------------------------------------------------------------------------------------- graph


@models.command()
@click.option(
    "--format",
    "output",
    type=click.Choice(["tree", "mermaid", "dot", "json"]),
    default="tree",
    show_default=True,
    help="A tree for people, a drawing for Mermaid or Graphviz, or JSON.",
)
@module_option
def graph(output: str) -> None:
    """Draw what models are built of: each below what it reads."""
    from weft.pipelines.models import by_names

    known = declared_models()
    names = by_names(known)
    kinds: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for model in known.values():
        for each in model.inputs:
            read = names.get(each.name)
            source, kind = (read.name, read.materialise) if read is not None else _source(model, each.name)
            kinds.setdefault(source, kind)
            edges.append((source, model.name))
        kinds.setdefault(model.name, model.materialise)
    if output == "json":
        nodes = [{"name": name, "kind": kind, "model": name in known} for name, kind in kinds.items()]
        print_json({"nodes": nodes, "edges": [{"from": start, "to": end} for start, end in edges]})
    elif output == "tree":
        _print_tree(kinds, edges)
    else:
        _draw(kinds, edges, output)


def _source(model: Model, name: str) -> tuple[str, str]:
    """Return the name and the kind of an input that is no model."""
    from weft.engine import relations
    from weft.errors import WeftError

    try:
        relation = relations.find(name, model.target.connection)
    except WeftError:
        return name, "unknown"
    if (stream := relation.stream) is not None:
        return f"{stream.schema}.{stream.name}", "stream"
    return name, "table" if relation.table is not None else "files"


def _print_tree(kinds: dict[str, str], edges: list[tuple[str, str]]) -> None:
    below: dict[str, list[str]] = {}
    for start, end in dict.fromkeys(edges):
        below.setdefault(start, []).append(end)
    printed: set[str] = set()

    def show(name: str, lead: str, turn: str, following: str) -> None:
        again = name in printed and name in below
        click.echo(f"{lead}{turn}{click.style(name, bold=True)} ({kinds[name]}){' …' if again else ''}")
        if again:
            return
        printed.add(name)
        children = below.get(name, [])
        for number, child in enumerate(children, 1):
            is_last = number == len(children)
            show(child, lead + following, "└─ " if is_last else "├─ ", "   " if is_last else "│  ")

    for name in kinds:
        if name not in {end for _, end in edges}:
            show(name, "", "", "")


def _draw(kinds: dict[str, str], edges: list[tuple[str, str]], output: str) -> None:
    numbers = {name: f"n{number}" for number, name in enumerate(kinds)}
    labels = {name: json.dumps(f"{name} ({kind})", ensure_ascii=False) for name, kind in kinds.items()}
    if output == "mermaid":
        click.echo("graph LR")
        for name, label in labels.items():
            # Mermaid knows no backslashes.
            click.echo(f"  {numbers[name]}[{label.replace(chr(92) + chr(34), '#quot;')}]")
        for start, end in dict.fromkeys(edges):
            click.echo(f"  {numbers[start]} --> {numbers[end]}")
        return
    click.echo("digraph models {\n  rankdir=LR;\n  node [shape=box];")
    for name, label in labels.items():
        click.echo(f"  {numbers[name]} [label={label}];")
    for start, end in dict.fromkeys(edges):
        click.echo(f"  {numbers[start]} -> {numbers[end]};")
    click.echo("}")
