"""Judges: what a model is shown to rank siblings, how its answer becomes rewards, and what it may cost."""
