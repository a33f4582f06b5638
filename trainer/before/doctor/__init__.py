"""`cotune doctor`: what a machine can run."""
