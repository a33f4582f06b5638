"""Judging the episodes of a training step while others are rolled out."""
