"""The configuration of a run, and its tables."""
