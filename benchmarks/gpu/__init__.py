"""Measurements of cotune on one GPU, in a few minutes and without network access: `python -m benchmarks.gpu`."""
