"""Whether a pipeline can run: asked of its databases, without changing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from weft.engine import inputs, run
from weft.engine.models.inputs import Observer
from weft.engine.models.survey import Survey
from weft.engine.preview import preview
from weft.errors import WeftError
from weft.pipelines.declare import Pipeline, PipelineTarget
from weft.pipelines.models import Model, ModelInput
from weft.pipelines.shared_tables import refuse_shared_tables
from weft.project import current
from weft.systems.base import Connection


@dataclass(frozen=True)
class ValidationResult:
    """The result of one check."""

    pipeline: str
    check: str
    detail: str
    problem: str | None = None
    delivery: str | None = None
    """How often a row may reach the target; streaming pipelines only."""


def validate(pipeline: Pipeline) -> Iterator[ValidationResult]:
    """Look at everything that a run needs, and go on where something is wrong."""
    name = pipeline.name
    yield run_check(name, "upstream", partial(_upstream, pipeline))
    if isinstance(pipeline, Model):
        opened = run_check(name, "target", partial(_open, pipeline.target.connection))
        yield opened
        if opened.problem is None:
            with Observer() as observer:
                for each in pipeline.inputs:
                    yield run_check(name, f"input {each.name}", partial(_input, Survey(observer), pipeline, each))
                yield run_check(name, f"build {pipeline.target.name}", partial(_build, Survey(observer), pipeline))
        return
    source = run.source_of(pipeline, pipeline.targets[0])
    opened = run_check(name, "source", partial(_open, source))
    yield opened
    reachable = opened.problem is None
    for target in pipeline.targets:
        if target.connection != source:
            answers = run_check(name, "target", partial(_open, target.connection))
            yield answers
            if answers.problem is not None:
                continue
        if reachable:
            yield run_check(name, f"load {target.name}", partial(_load, pipeline, target))


def _input(survey: Survey, model: Model, each: ModelInput) -> str:
    (source,) = (one for one in survey.sources(model) if one.input is each)
    if source.reader is None:  # to look at files takes Spark
        return "files"
    kind = "stream" if source.relation.stream is not None else "table"
    return f"{kind} with {len(source.schema())} columns, on {source.relation.connection.label}"


def _build(survey: Survey, model: Model) -> str:
    status = survey.status(model)
    if status.problem is not None:
        raise WeftError(status.problem)
    lake = survey.observer.lake(model)
    if lake is not None:
        lake.refuse(model)
    survey.observer.refuse_foreign(model, status.stored)
    compiled = survey.compiled(model)
    engine = "of a frame" if compiled is None else f"by {compiled.engine}"
    table = "the table is there" if status.is_built else "creates the table"
    return f"{model.materialise} {engine}; {table}; exactly once"


def _upstream(pipeline: Pipeline) -> str:
    from weft.pipelines import graph

    graph.refuse_unknown_dependencies({**current().pipelines, pipeline.name: pipeline})
    refuse_shared_tables(pipeline)
    return ", ".join(pipeline.depends_on) or "none"


def run_check(pipeline: str, check: str, at: Callable[[], str], delivery: str | None = None) -> ValidationResult:
    """Run one check: return what it found, or what is wrong."""
    try:
        return ValidationResult(pipeline, check, at(), delivery=delivery)
    except WeftError as error:
        return ValidationResult(pipeline, check, "", str(error), delivery)
    except Exception as error:  # of the pipeline's own function
        return ValidationResult(pipeline, check, "", f"{type(error).__name__}: {error}", delivery)


def open_connection(connection: Connection) -> str:
    """Ask a connection whether it answers, and return where it leads."""
    answer = connection.check()
    return f"{connection.target} ({answer.get('server', connection.kind)})"


def _open(connection: str | Connection | None) -> str:
    return open_connection(current().connection(connection))


def _load(pipeline: Pipeline, target: PipelineTarget) -> str:
    data = run.understand(pipeline, run.produce(pipeline))
    if not isinstance(data, inputs.SourceSql | inputs.SparkSql):
        # Each run makes frames and rows again: what they hold is known then.
        return f"{type(data).__name__.lower()}, {target.options.get('mode', 'append')}"
    result = preview(pipeline, target, datetime.now(UTC), data=data, rows=0, trial=False)
    if result.refused is not None:
        raise result.refused
    engine = ", nothing is new" if result.engine == "none" else f" by {result.engine}"
    table = "creates the table" if result.creates else "the table is there"
    added = f", adds {', '.join(result.adds)}" if result.adds else ""
    return f"{result.mode}{engine}; {table}{added}; exactly once"
