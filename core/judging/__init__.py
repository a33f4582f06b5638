"""Judges of whole episodes, their questions, and rewards from their answers."""
