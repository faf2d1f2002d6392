"""Topics of Kafka: read and written by Spark's own connector."""
