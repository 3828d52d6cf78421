"""The commands of the planner, a file for each: its arguments, then its action."""
