"""`make fuzz-data`: python -m fuzz_data, from tests/."""

import sys

from fuzz_data.campaign import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
