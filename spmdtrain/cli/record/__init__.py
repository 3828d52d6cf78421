"""Commands that examine a run's records: is it correct, why is a step odd, what has changed."""
