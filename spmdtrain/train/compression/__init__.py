"""Compresses gradients that cross `data`, [compression], with error feedback."""
