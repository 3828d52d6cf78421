"""Reads the time that assembled kernels need at least, without a GPU to time them on.

loops.py      the main loop in the assembler's text
bounds.py     the least time of a turn of it, and what that allows of a GPU's peak
__main__.py   compiles the attention kernels and writes docs/kernel_bounds.md
"""
