"""The in-process sampler: cotune's decode loop on a transformers model."""
