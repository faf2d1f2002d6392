"""Redis: streams on a single server, behind Sentinels, or on a cluster."""
