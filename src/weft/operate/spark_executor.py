"""Starts each run with a cluster of its own: `spark://master:7077?cores=8&executor-memory=4g`.

The run is a process of this host, and the driver of an application of its own on a standalone cluster of Spark's: the
master gives it executors when it needs Spark, and takes them back when it ends. (Spark itself runs no Python driver
inside such a cluster.) A run that its database can do alone starts no application.
"""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qsl

from weft.engine import config
from weft.errors import SettingsError, listed
from weft.operate.executors import Dispatch, Process, Subprocess

_EXAMPLE = "spark://spark-master:7077?cores=8&executor-memory=4g"
_SETTINGS = {
    "cores": "spark.cores.max",
    "executor-cores": "spark.executor.cores",
    "executor-memory": "spark.executor.memory",
    "driver-memory": "spark.driver.memory",
    "python": "spark.pyspark.python",
}
_MEMORY = re.compile(r"[1-9][0-9]*[kmgt]b?", re.IGNORECASE)


class SparkExecutor:
    """Starts runs as applications of a standalone cluster."""

    def __init__(self, url: str) -> None:
        self.master, _, query = url.partition("?")
        config.masters(self.master)  # raises where there is none
        self.conf: dict[str, str] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in _SETTINGS:
                hint = listed(name, _SETTINGS, f"It takes: {', '.join(_SETTINGS)}. Others are in [spark.conf].")
                raise SettingsError(f"spark:// takes no option {name!r}.", hint=hint)
            if name.endswith("cores") and not (value.isdigit() and int(value)):
                raise SettingsError(f"{name} of spark:// is a whole number.", hint=_EXAMPLE)
            if name.endswith("memory") and not _MEMORY.fullmatch(value):
                raise SettingsError(f"{name} of spark:// is a size such as 4g or 512m.", hint=_EXAMPLE)
            self.conf[_SETTINGS[name]] = value
        self._processes = Subprocess("subprocess+python://")

    def start(self, dispatch: Dispatch) -> Process:
        return self._processes.start(dispatch, self.environment(dispatch))

    def environment(self, dispatch: Dispatch) -> dict[str, str]:
        """Return what makes a run one on the cluster."""
        # The name by which people find the run in the UI of the master.
        conf = {"spark.app.name": f"weft {dispatch.pipeline}", **self.conf}
        return {config.MASTER_VARIABLE: self.master, config.CONF_VARIABLE: json.dumps(conf)}
