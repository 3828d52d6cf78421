"""Defines the models. They name logical axes, never axes of a mesh.

Start with transformer.py, then layers/ and stack.py. context.py has what a layer may need in
addition to its input; abstract.py describes a model before anything is allocated.
"""
