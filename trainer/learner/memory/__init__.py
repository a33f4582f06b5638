"""What training takes of memory: the size of passes, checkpointed layers, optimizers."""
