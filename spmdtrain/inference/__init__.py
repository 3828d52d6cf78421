"""A run that has been trained, read: samples, evaluations and the tasks of others.

trained_run.py opens one; all other files take what it returns.
"""
