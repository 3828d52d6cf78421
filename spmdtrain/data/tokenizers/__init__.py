"""Text to ids and back: bytes, characters, files of Hugging Face, and conversations."""
