"""`python -m cotune`: the command line."""

import sys

from cotune.cli.main import main

sys.exit(main())
