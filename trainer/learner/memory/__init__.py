"""The memory of training: the size of passes, checkpointed layers, optimizers."""
