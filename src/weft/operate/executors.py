"""What starts the runs that a scheduler dispatches: an executor, named by a URL.

`subprocess://` starts `weft run-due NAME` on this host, `subprocess+python://` the same by this Python, `k8s://` as a
Job of Kubernetes, `lambda://` by a call of a function of Lambda, `spark://` with a cluster of Spark's. A third party's
package adds others by an entry point in the group `weft.executors`: a class that takes the URL and has `start`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from weft import settings
from weft.errors import NotFoundError, SettingsError, listed
from weft.systems.base import url_scheme

GROUP = "weft.executors"
_BUILT_IN = {
    "k8s": "weft.operate.kubernetes_executor:KubernetesExecutor",
    "lambda": "weft.operate.lambda_executor:LambdaExecutor",
    "spark": "weft.operate.spark_executor:SparkExecutor",
}


@dataclass(frozen=True)
class Dispatch:
    """A run to start: the pipeline that is due, and what the command that runs it needs."""

    pipeline: str
    modules: tuple[str, ...] = ()
    run_log: str | None = None
    alerters: tuple[str, ...] = ()
    traces: str | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    """The variables that name the trace of this dispatch, where there is one."""

    @property
    def arguments(self) -> list[str]:
        """The arguments of `weft`. The command claims the slot in the run log, so that a second one runs nothing."""
        return ["run-due", self.pipeline, *(word for name in self.modules for word in ("--module", name))]

    @property
    def environment(self) -> dict[str, str]:
        """What the command finds in its environment, where others of this host cannot read the secrets of URLs."""
        # The scheduler counts the run, and has the port of its metrics.
        values = {
            "WEFT_RUN_LOG": self.run_log,
            # The scheduler would start it again, perhaps on another host.
            "WEFT_ON_RUN_LOG_FAILURE": "fail",
            "WEFT_ALERTERS": " ".join(self.alerters),
            "WEFT_METRICS": "null://",
            "WEFT_TRACES": self.traces,
            **self.trace,
        }
        return {name: value for name, value in values.items() if value}


class Started(Protocol):
    """A run that was started.

    Where it has an attribute `tells_end` that is true, `None` from `ended` means that it runs. Else the scheduler goes
    by the run log: it starts the next slot also if no executor reported how the last one ended.
    """

    def ended(self) -> int | None:
        """Return its exit code; `None` while it runs, or where it is not known."""


class Executor(Protocol):
    """Starts runs somewhere."""

    def start(self, dispatch: Dispatch) -> Started:
        """Start a run, and return at once. Raises where it could not be started."""


@dataclass(frozen=True)
class Process:
    """A process of this host."""

    process: subprocess.Popen[bytes]
    tells_end: ClassVar[bool] = True

    def ended(self) -> int | None:
        return self.process.poll()


class Subprocess:
    """Starts runs as processes of this host. They go on when the scheduler ends."""

    def __init__(self, url: str) -> None:
        self.command = _command(url)

    def start(self, dispatch: Dispatch, more: Mapping[str, str] | None = None) -> Process:
        """Start a run, with `more` in its environment."""
        return Process(
            subprocess.Popen(
                [*self.command, *dispatch.arguments],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env={**os.environ, **dispatch.environment, **(more or {})},
                # A signal to the scheduler's terminal is not one to the runs.
                start_new_session=True,
            )
        )


def _command(url: str) -> Sequence[str]:
    if url_scheme(url) == "subprocess+python":
        return [sys.executable, "-m", "weft"]
    path = shutil.which("weft")
    if path is None:
        raise SettingsError(
            "subprocess:// starts the command weft, which is not on the PATH.", hint="Use subprocess+python://"
        )
    return [path]


def open_executor(url: str) -> Executor:
    scheme = url_scheme(url) or url
    if scheme in ("subprocess", "subprocess+python"):
        if url.partition("://")[2]:
            raise SettingsError(f"{scheme}:// takes nothing behind it.", hint=f"{scheme}://")
        return Subprocess(url)
    if scheme in _BUILT_IN:
        module, _, name = _BUILT_IN[scheme].partition(":")
        built_in: Executor = getattr(importlib.import_module(module), name)(settings.interpolate(url, "the executor"))
        return built_in
    installed = {each.name: each for each in importlib.metadata.entry_points(group=GROUP)}
    if scheme in installed:
        executor: Executor = installed[scheme].load()(url)
        return executor
    known = ["subprocess", "subprocess+python", *_BUILT_IN, *installed]
    raise NotFoundError(
        f"There is no executor {scheme!r}.",
        hint=listed(scheme, known, f"There are: {', '.join(f'{each}://' for each in known)}."),
    )
