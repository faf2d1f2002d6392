"""Helpers for Spark sessions, errors and files that systems and the engine share."""
