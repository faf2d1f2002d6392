"""SQLite as a system."""
