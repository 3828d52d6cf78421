"""Other people's weights: directories of Hugging Face, read into our parameters and written again.

`files` opens safetensors, `names` says which of their tensors are which of our parameters, `pieces`
how they lie in them, `weights` reads a directory by that, and `writer` writes one.
"""
