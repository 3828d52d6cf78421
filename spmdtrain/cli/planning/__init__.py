"""The commands of the planner, a file for each: its arguments, then what it runs."""
