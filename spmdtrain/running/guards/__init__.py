"""Watches a run while it trains: bad steps, replicas, stragglers, signals and memory."""
