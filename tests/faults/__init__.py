"""The fault battery: what breaks a run, and proof that it survives. `make faults` runs all of
it.
"""
