"""Compares strategies: the same run, laid out over the same devices in the ways that have names.

As arXiv:2405.15628 compares them for GPT-2. Start with layouts.py, which says what each name means.
"""
