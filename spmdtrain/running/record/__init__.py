"""Records what is needed to repeat each step of a run and to prove that it is the same.

start.py writes RUN/starts/N.json once for each start, and step_record.py a line of RUN/steps.jsonl
for each step.
"""
