"""The processes of a run: who they are, how they hear of each other, and how they end. No tensors.

processes.py joins them, scheduler.py reads what Slurm and Open MPI say, coordinator.py and peers.py
tell every process why another one has ended, pulse.py tells the launcher how far a run is,
signals.py and closed_outputs.py end a command well, and xla_flags.py is what XLA is told.
"""
