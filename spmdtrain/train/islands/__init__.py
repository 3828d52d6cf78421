"""Islands: what a meeting does to the training state. The files of a meeting are in running/."""
