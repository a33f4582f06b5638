"""vLLM as a sampler: in this process's charge, or a server by its address."""
