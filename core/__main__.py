"""`python -m cotune`: the command line."""

from cotune.cli.main import run

run()
