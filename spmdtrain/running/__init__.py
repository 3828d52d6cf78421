"""Runs many steps, with all that surrounds them: checkpoints, logs, evaluation, sampling.

Start with loop.py, `run`. checkpoint.py is the only door to Orbax. (Not named `run`: that is the
public verb, `spmdtrain.run`.)
"""
