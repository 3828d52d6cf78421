"""Reads the text of a compiled program: collectives, memory, traffic, and which traffic is
hidden.
"""
