"""The ablation table of a team: what training alone, together, with one policy or with a policy per role gives."""
