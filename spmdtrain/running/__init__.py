"""Runs many steps, and what happens over them: saves, returns to a checkpoint, evaluations.

Start with loop.py, `run`. guards/ watches the steps, and report/ says what happens. (Not named
`run`: that is the public verb, `spmdtrain.run`.)
"""
