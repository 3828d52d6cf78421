"""Provides the data that a run trains on, from text to batches. Nothing here knows about models.

Start with batches.py: a batch is a pure function of the sample index. corpus.py opens the corpus
that batches are cut from. token_files/ reads token files; prepare/ makes them from the documents
that texts/ reads and the conversations that chats/ writes out, with the tokenizers of tokenizers/.
"""
