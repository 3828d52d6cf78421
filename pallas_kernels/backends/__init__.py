"""Wraps the compilers of kernels, each in one thin file: Pallas on Triton, and Pallas on Mosaic
GPU.

Kernels reach their compiler only through here, so a change of jax's API has one place. Start with
triton.py, the smaller; mosaic.py explains warpgroups, barriers and the interpreter, and rings.py
how tiles pass from one warpgroup to others.
"""
