"""Mixes the tokens of a sequence in a time linear in its length: each head keeps a state of a fixed
size.

Letters in this room: b sequence, t token, e embed, h key head, r value head of a key head, k key
channel, v value channel, n channel of a key head in a projection or convolution, w tap; c chunk of
tokens, i and j places in it.
"""
