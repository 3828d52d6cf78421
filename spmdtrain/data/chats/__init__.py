"""Conversations as tokens: rows become conversations, a template writes them, answers are learned.

Start with encode.py. A template is simple ({role} and {content}) or one of Jinja, as published with
a model; code of the latter runs in a separate process.
"""
