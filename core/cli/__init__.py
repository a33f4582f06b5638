"""The command line: `cotune COMMAND`."""
