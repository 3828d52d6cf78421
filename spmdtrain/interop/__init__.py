"""Reads published weights, in Hugging Face directories, into our parameters, and writes them back.

`safetensors_files` opens files, `names` maps their tensors to our parameters, `pieces` composes a
parameter of tensors, `published_weights` reads a directory, and `writer` writes one.
"""
