"""Documents of the files that people have: text, JSON lines, tables; compressed or not."""
