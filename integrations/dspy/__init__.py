"""DSPy."""
