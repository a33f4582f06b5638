"""One sampler over several engines: prefix affinity, retries, restarts."""
