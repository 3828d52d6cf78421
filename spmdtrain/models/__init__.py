"""Defines the models. They name logical axes, never axes of a mesh.

Start with transformer.py, then layers/ and stack.py. context.py has the further inputs of a layer;
abstract.py describes a model before anything is allocated.
"""
