"""Copies of the snapshots of each host in the memory of the next one, from launcher to launcher.

    peer.py     sends this host's, keeps those of the host before it, and fetches its own anew
    meeting.py  how launchers find each other
    wire.py     a snapshot on its way, with a checksum

All of it is plain TCP among hosts that trust each other, as jax's own coordinator is.
"""
