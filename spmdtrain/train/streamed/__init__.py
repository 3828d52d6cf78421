"""Updates whose moments rest on the host."""
