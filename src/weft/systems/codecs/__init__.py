"""Formats of messages: one module a codec."""
