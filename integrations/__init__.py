"""The outside world: one file per foreign system, imported lazily and nowhere else."""
