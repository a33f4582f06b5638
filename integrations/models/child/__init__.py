"""Engines in child processes: the pipe to one, its start and certain end, and any sampler behind it."""
