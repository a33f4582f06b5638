"""Episodes of a training run: in this process, or in rollout workers."""
