"""`cotune eval`: policies compared on held-out tasks, with intervals."""
