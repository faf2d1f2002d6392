"""Declared pipelines: tables as classes, loads as functions. What to do; nothing here opens a connection."""
