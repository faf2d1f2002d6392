"""Spark: its session, its jars, and the loads that it runs. `pyspark` is imported here and in `systems` only."""

starts_engine: bool | None = None
"""Whether this process may start a warm engine: a command for which it is there. False: it goes without one, whatever
runs. Here, because commands that need no Spark set it too, and do not import `weft.engine.warm`."""
