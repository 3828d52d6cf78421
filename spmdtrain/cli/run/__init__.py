"""The commands on runs, a file for each: its arguments, then its action."""
