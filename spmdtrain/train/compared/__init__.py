"""Makes training steps comparable: plain states, and a step that shows its results."""
