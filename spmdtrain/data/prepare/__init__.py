"""`data prepare`: documents in, token files out. Start with prepare_corpus.py."""
