"""Streaming pipelines on Spark. The query carries offsets and remembers them; each micro-batch is a load."""
