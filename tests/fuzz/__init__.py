"""A fuzzer of whole run configurations: `make fuzz`. Start reading at check.py, `examine`."""
