"""Files of data, varied and damaged at random: `make fuzz-data`."""
