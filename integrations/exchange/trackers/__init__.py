"""Experiment trackers, through accelerate."""
