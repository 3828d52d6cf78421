"""Reads other people's weights, in Hugging Face directories, into our parameters, and writes them
back.

`files` opens safetensors, `names` maps their tensors to our parameters, `pieces` says how a
parameter is composed of tensors, `weights` reads a directory, and `writer` writes one.
"""
