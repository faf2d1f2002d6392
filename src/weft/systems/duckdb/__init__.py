"""DuckDB."""
