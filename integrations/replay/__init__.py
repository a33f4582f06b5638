"""time-machine: the clock of Python, hooked in place, so that an episode may have one of its own."""
