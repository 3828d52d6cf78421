"""A run on one page: reads the files of runs, and nothing else; imports no jax."""
