"""What must hold of a run without a second layout to compare it with. Start with witness.py."""
