"""Runs attention when mesh axes, usually `context`, split the tokens of a sequence.

context_method.py chooses one of three methods, and the order of tokens that it needs. Two are in
ring.py and ulysses.py. The third gathers the keys: it needs no code beyond a dim that is `Whole`.
"""
