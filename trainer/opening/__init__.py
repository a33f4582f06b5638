"""Opens a run: a new one, a resumed one, one that starts from an export, here or on a cluster."""
