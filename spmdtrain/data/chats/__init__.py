"""Turns conversations into tokens: rows become conversations, a template writes them, answers are
learned.

Start with encode_conversation.py. A template is simple ({role} and {content}) or a Jinja template,
as published with a model; the latter's code runs in a separate process.
"""
