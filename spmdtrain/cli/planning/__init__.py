"""The planner's commands, a file for each: its arguments, then what it runs."""
