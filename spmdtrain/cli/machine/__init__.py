"""Commands that measure the machine: `tune`, and `doctor --measure`."""
