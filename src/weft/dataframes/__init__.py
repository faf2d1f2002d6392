"""Streams as DataFrames."""
