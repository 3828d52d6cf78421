"""Token files, ours and other programs', and the rows that are read from them."""
