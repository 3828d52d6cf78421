"""Places tensors on the devices of a mesh, and moves them. No file here knows a model.

Start with mesh.py (devices to a mesh), axes.py (logical axes to mesh axes) and regions.py (manual
and automatic axes). reduce.py reduces gradients, and gather.py brings weights to the layer that
uses them.
"""
