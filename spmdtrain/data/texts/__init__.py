"""Reads documents from common files: text, JSON lines, tables; compressed or not."""
