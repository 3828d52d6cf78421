"""Text to ids and back: bytes, characters, Hugging Face files, and conversations."""
