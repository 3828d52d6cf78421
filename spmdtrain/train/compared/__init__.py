"""What comparing two training steps takes: plain states, and a step that shows its results."""
