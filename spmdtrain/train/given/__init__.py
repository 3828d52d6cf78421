"""Checks what a caller gives a step, and puts it where it belongs. Start with arrays.py."""
