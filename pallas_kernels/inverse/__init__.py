"""Inverts unit lower triangular matrices, as linear-time mixers have one for each chunk and head.

Start with api.py.
"""

from pallas_kernels.inverse.api import unit_inverse as unit_inverse
