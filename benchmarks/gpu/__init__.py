"""What one GPU does with cotune, in a few minutes and without network access: `python -m benchmarks.gpu`."""
