"""Runs pipelines: a schedule is a table, and one executor runs every table.

Start with schedule.py, which builds tables, then executor.py, which runs one tick by tick. check.py
says what makes a table legal, find_table.py finds the one that a run asks for, phases.py folds a
table into scans, stage_layout.py says which stage holds which layers, and layer_vjp.py splits a
layer's backward. file.py, timing.py and draw.py are for people.
"""
