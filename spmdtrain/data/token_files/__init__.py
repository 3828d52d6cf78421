"""Files of tokens, ours and those of others, and the rows that are read from them."""
