"""Shows what a step costs its devices: memory, traffic, seconds by part, and whether it got
slower.
"""
