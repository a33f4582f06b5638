"""Ray: its runtime, and objects of ours in its actors."""
