"""The models. They name logical axes, never axes of a mesh.

Start with transformer.py, then layers/ and stack.py. context.py is what a layer may ask for
besides its input; abstract.py is a model before it has memory.
"""
