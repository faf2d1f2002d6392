"""Delta Lake tables in a folder or in a bucket."""
