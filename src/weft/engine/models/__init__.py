"""Models: how their inputs are read, built and found stale."""
