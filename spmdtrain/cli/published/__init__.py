"""The commands on published models, a file for each: its arguments, then its action."""
