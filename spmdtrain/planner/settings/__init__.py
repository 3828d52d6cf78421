"""Settings that a plan proposes: those of a layout, and those with which a run fits."""
