"""Schema registries: what keeps the schemas of messages, each by its id."""
