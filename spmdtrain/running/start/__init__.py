"""Everything a run does before its first step, in the order in which loop.py calls it.

prepare.py opens the data and fits the mesh, session.py takes the run directory, and begin.py makes
or resumes the first state. The other files hold the checks that these make.
"""
