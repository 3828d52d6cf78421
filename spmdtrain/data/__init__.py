"""The data that a run trains on, from text to batches. No file here knows a model.

Start with batches.py: a batch is a pure function of the sample index. corpus.py opens what it is
cut from, tokens.py reads and writes token files, prepare.py makes them.
"""
