"""Learning from recorded answers, without rollouts: recipes sft, dpo and sweet_rl."""
