"""What a run says of itself: on the terminal, in its files and to the sinks."""
