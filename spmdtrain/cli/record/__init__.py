"""Commands that examine what a run has recorded: is it correct, why is it odd, what has changed."""
