"""Reports on a run: on the terminal, in its files and to the sinks."""
