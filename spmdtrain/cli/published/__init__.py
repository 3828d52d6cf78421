"""The commands on published models, a file for each: its arguments, then what it runs."""
