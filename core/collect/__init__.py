"""Where records go: a store or a collector, and how much of an episode a collector gets."""
