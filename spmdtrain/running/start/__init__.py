"""What a run does before its first step, in the order in which loop.py asks for it.

prepare.py opens the data and fits the mesh, session.py takes the run directory, and begin.py has
the state that the run begins with or goes on from. The other files are what these check.
"""
