"""A run: its folder, its state, its checkpoints, its engines and its devices."""
