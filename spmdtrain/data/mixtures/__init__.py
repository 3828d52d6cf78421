"""Which source each sample of a mixture comes from."""
