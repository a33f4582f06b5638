"""What answers a call: plans, scorers, the `Sampler` protocol, and a stub without a model."""
