"""Changes the training state at the meetings of islands. The files of a meeting are in running/."""
