"""Makes the setup of a model, and joins it with that of a teacher."""
