"""Inspects data as a run reads it: the windows of a step, and counts of whole corpora."""
