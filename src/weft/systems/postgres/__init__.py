"""PostgreSQL as a system."""
