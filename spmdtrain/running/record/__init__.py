"""What a run keeps so that each of its steps can be proved and taken again.

start.py writes RUN/starts/N.json once for each start, and feed.py a line of RUN/steps.jsonl for
each step.
"""
