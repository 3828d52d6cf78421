"""`python -m spmdtrain` is `spmdtrain`."""

import sys

from spmdtrain.cli import main

sys.exit(main())
