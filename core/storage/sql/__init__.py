"""What all stores that speak SQL share: queries, the queue of a writer, and what a transaction does."""
