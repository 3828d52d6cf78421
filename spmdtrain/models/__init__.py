"""What is computed; speaks logical axes only.

Start with transformer.py, then layers.py and stack.py. context.py is what a layer may ask for
besides its input; abstract.py is a model before it has memory.
"""
