import sys

from spmdtrain.cli import main

sys.exit(main())
