"""The data that a run trains on, from text to batches. No file here knows a model.

Start with batches.py: a batch is a pure function of the sample index. corpus.py opens what it is
cut from. token_files/ reads files of tokens and prepare/ makes them, out of the documents of
texts/ and with the tokenizers of tokenizers/.
"""
