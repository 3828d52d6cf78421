"""Keeps what a teacher says of each training token in a folder beside the data."""
