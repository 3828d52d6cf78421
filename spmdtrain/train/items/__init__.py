"""The items of the training state. A new one is a file here and a line in items.py."""
