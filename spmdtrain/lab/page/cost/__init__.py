"""Shows the costs of a step on its devices: memory, traffic, seconds by part, and slowing down."""
