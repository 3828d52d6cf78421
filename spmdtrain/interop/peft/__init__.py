"""Adapters in the format of the package peft."""
