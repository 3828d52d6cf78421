"""Renders a run on one page: reads only the files of runs, and imports no jax."""
