"""The ablation table of a team: results of training agents alone, together, with one policy, or with one per role."""
