"""What a caller hands a step: checked, and put where it belongs. Start with arrays.py."""
