"""Streams on SQL databases: what SQLite, PostgreSQL and MariaDB/MySQL share. The three differ in `SqlStore`'s hooks
only."""
