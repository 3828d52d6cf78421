"""Adapters: products of low rank added to the frozen weights of matmuls, as [finetune] says.

`adapt` puts an `AdaptedWeight` in the place of each weight that [finetune] targets. It is a weight
type of projection.py, so that layers, meshes and pipelines see nothing new. The weight keeps its
dotted path: a checkpoint of the model without adapters lacks the leaves of the adapters, and no
others.
"""
