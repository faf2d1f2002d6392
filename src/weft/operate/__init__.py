"""Runs declared pipelines: schedules, claims, the run log, alerts, and streaming pipelines that stay up."""
