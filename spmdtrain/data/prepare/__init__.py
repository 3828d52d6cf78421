"""`data prepare`: documents in, token files out. prepare.py is the order of it."""
