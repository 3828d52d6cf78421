"""Distributes the experts of a mixture over the devices of a mesh, and sends tokens to them.

Start with layer.py. A *row* is a token and one of its choices; a *message* is a token and a device
that has experts of its choice, so that it travels once for all of them. Rows go in *rounds*: a
round sends at most a bucket from each device to each other one; rows that do not fit wait for the
next round. So shapes are static, memory is that of one round, and nothing is ever dropped: the
worst routing costs time.

Every float moves by a gather, in both directions: each row knows its place, and each place its row.
So no sum depends on the order in which devices or threads run.

n: tokens of a device, k: choices of a token, s: rows sorted by device, d: devices, c: rows of a
bucket, m: messages of a bucket, q: rows that arrive, p: rows padded to whole tiles, t: tiles,
l: experts of a device, e: width of the stream, f: width of an expert.
"""

from spmdtrain.parallel.experts.layer import Experts as Experts
from spmdtrain.parallel.experts.layer import make_experts as make_experts
