"""The in-process sampler: a decode loop of its own on a transformers model."""
