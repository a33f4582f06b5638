"""Applications to run from the repository's root: `python -m examples.plan_path.demo`."""
