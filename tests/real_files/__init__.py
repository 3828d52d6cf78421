"""What real tools write on valid input, at pinned versions: read by us, or refused in one right
line. `make real-files` installs the tools, runs them without our code, and writes the table.
"""
