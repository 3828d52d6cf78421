"""`spmdtrain launch`: starts the processes of a run on this host, watches and restarts them.

    launch.py    the attempts of a run, until one ends properly: read it first
    ranks.py     the processes of one attempt: start, listen, dump their stacks, end
    snapshot_memory.py  the memory in which processes leave snapshots of their state
    peer/        copies of that memory on the next host
    patience.py  how long a phase may take before it counts as a hang
    goodput.py   an account of the time
    place.py     the number of this host among several

The launcher imports no jax. It is a separate process, so it also notices a trainer that hangs while
it holds Python's lock, or in C.
"""
