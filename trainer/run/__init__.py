"""What a run is: its folder, its state, its checkpoints, its engines and where it runs."""
