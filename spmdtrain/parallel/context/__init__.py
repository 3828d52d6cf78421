"""Runs attention when mesh axes, usually `context`, split the tokens of a sequence.

ways.py names the ways and the order of tokens that each needs; ring.py and ulysses.py are two of
them. The third gathers the keys: it needs no code beyond a dim that is `Whole`.
"""
