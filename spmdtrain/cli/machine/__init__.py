"""Commands that measure the machine: `tune`."""
