"""Islands that meet over a slow network: the files of a meeting, and what an island does there."""
