"""What `cotune show` prints."""
