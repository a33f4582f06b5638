"""The output of `cotune show`."""
