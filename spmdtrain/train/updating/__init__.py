"""The update of all parameters by a step, with their moments on the device or on the host."""
