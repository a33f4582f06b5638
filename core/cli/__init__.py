"""The command line: `cotune COMMAND`, and what its commands print."""
