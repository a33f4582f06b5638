"""Training: config, the loop, batches, losses, learners, checkpoint, evaluation."""
