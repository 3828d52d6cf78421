"""The commands on data, a file for each: its arguments, then its action."""
