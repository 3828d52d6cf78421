"""Tokenises documents while a run reads them, from this machine or from a remote store."""
