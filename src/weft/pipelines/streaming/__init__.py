"""Streaming pipelines: what was declared, in Python or in TOML. Opens nothing."""
