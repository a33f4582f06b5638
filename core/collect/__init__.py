"""The destination of records, a store or a collector, and the share of an episode that a collector gets."""
