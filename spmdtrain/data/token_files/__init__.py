"""Reads token files, ours and other programs', and rows of numbers in them."""
