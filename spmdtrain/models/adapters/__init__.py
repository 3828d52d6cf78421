"""Adds adapters, products of low rank, to the frozen weights of matmuls, as set in [finetune].

`adapt` replaces each weight that [finetune] targets by an `AdaptedWeight`. It is a weight type of
projection.py, so layers, meshes and pipelines see nothing new. The weight keeps its dotted path: a
checkpoint of the model without adapters lacks only the leaves of the adapters.
"""
