"""The processes of a run: how they find each other, share news, and end. No tensors here.

processes.py joins them, scheduler.py reads the environment of Slurm and Open MPI, coordinator.py
and peers.py tell every process why another one ended, pulse.py reports progress to the launcher,
signals.py and closed_outputs.py end a command cleanly, and xla_flags.py sets XLA's flags.
"""
