"""`cotune doctor`: whether a machine can run a configuration."""
