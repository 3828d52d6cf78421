"""Maps the names of tensors in files to our parameters, for each family, in both directions.

`{}` stands for the number of the layer, and `{x}` for that of the expert. A parameter that a model
lacks is left out, along with its tensors.
"""
