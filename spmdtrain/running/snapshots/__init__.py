"""Snapshots in a run: opened.py gets their memory from the launcher, if the host has enough."""
