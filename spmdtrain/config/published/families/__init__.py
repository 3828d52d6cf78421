"""The families of published models: the function of each, and the keys peculiar to it.

A file has the models of one lineage, and `all_families` joins them. What they share is in
`family`, `activations`, `biases`, `layer_windows` and `expert_keys`.
"""
