"""Commands that ask what a run has recorded: is it right, why is it odd, what has changed."""
