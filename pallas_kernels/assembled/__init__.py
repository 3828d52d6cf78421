"""Finds the least time that assembled kernels need, without a GPU to time them on.

loops.py        the main loop in the assembler's text
bounds.py       the least time of one turn, and the share of a GPU's peak that it allows
recurrences.py  what a turn of the kernels of recurrences moves and multiplies
__main__.py     compiles the kernels and writes docs/kernel_bounds.md
"""
