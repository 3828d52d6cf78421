"""The items of the training state; those of a larger feature are in the feature's folder."""
