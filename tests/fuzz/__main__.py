"""`make fuzz`: python -m fuzz, from tests/."""

import sys

from fuzz.campaign import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
