"""Runs many steps, with their saves, evaluations and returns to older checkpoints.

Start with loop.py, `run`. guards/ watches the steps, and report/ tells people about them. (The room
is not named `run` because that is the public verb, `spmdtrain.run`.)
"""
