"""Pipelines: a schedule is a table, and one executor runs every table.

Start with schedule.py, the tables, then executor.py, which ticks through one. check.py says what
makes a table legal, choose.py finds the one a run asks for, phases.py folds it into scans,
layout.py lays layers on stages, layer_vjp.py takes a layer's backward apart; file.py, timing.py and
draw.py are for people.
"""
