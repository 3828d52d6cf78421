"""Compares strategies: the same run, laid out over the same devices in the ways that have names.

Start with layouts.py, which says what each name means.
"""
