"""`spmdtrain launch`: starts the processes of a run on this host, watches them, and starts them
again.

    launch.py    the attempts of a run, until one ends as it should: read it first
    ranks.py     the processes of one attempt: start, listen, dump their stacks, end
    patience.py  how long a phase may take before it counts as a hang
    goodput.py   what the time was spent on
    place.py     where this host stands among several

The launcher imports no jax. It is a process of its own, so that a trainer that hangs with Python's
lock held, or in C, is noticed too.
"""
