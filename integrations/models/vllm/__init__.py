"""vLLM as a sampler: an engine that this process starts, or a running server."""
