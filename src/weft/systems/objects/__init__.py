"""Files in a folder or in a bucket: Parquet, CSV, JSON lines and ORC."""
