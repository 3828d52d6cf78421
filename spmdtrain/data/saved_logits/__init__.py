"""Keeps a teacher's prediction at each training token in a folder beside the data."""
