"""Code of the user that a config names: imported by its name, and given its arguments."""
