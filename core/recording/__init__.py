"""Records the episodes of an application while it runs."""
