"""Builds the training step from a config and a mesh.

Start with setup.py (config meets devices, once), then step.py, whose order is that of the step.
gradients/ computes its gradients, by accumulation or by a pipeline, and updates/ has the
optimizers.
"""
