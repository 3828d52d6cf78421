"""Copies of each host's snapshots in the memory of the next host, from launcher to launcher.

    peer.py     sends this host's snapshots, keeps the previous host's, and fetches its own again
    meeting.py  how launchers find each other
    wire.py     the transfer of a snapshot, with a checksum

All of it is plain TCP among hosts that trust each other, like jax's own coordinator.
"""
