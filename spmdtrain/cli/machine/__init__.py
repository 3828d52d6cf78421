"""The commands on this machine, a file for each: its arguments, then its action."""
