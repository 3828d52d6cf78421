"""Fuses the unembedding matmul and its cross-entropy, without ever holding all logits: see api.py.

Other losses of the same logits have a file each, from which they are imported: own.py any loss of a
token, distilled.py and saved.py that of a student, likeliest.py the likeliest tokens.
"""

from pallas_kernels.loss.api import linear_cross_entropy as linear_cross_entropy
from pallas_kernels.loss.api import shape_logits as shape_logits
