"""Turns text into ids and back, with bytes, characters or Hugging Face files."""
