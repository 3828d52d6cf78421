"""Everything a run does before its first step, in the order in which loop.py calls it.

prepare.py checks the arguments, opens the data and fits the mesh; begin.py takes the run directory
and makes or resumes the first state; compiling.py compiles the step. The other files hold the
checks that these make.
"""
