"""The order of a run's tasks, and which policies play its roles, step by step."""
