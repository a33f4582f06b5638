"""`python -m cotune`: the command line."""

import sys

from cotune.cli import main

sys.exit(main())
