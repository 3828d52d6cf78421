"""What happens over many steps, and around them.

Start with loop.py, `run`. checkpoint.py is the only door to Orbax. (Not named `run`: that is the
public verb, `spmdtrain.run`.)
"""
