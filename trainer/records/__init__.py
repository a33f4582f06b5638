"""Learning from recorded answers, without rollouts: recipes sft and dpo."""
