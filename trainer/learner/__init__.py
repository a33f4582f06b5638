"""Updating weights: forward pass, losses, optimizer, and proof that each tensor moves."""
