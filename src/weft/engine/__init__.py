"""Spark: its session, its jars, and the loads that it runs. `pyspark` is imported here and in `systems` only."""
