"""The `gepa` library, which searches for texts by reflection; imported nowhere else."""
