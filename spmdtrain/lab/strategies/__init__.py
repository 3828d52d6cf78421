"""Compares strategies: named ways to lay out the same run over the same devices.

arXiv:2405.15628 compares them for GPT-2. Start with layouts.py, which defines the names.
"""
