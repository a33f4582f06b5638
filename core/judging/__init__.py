"""Judges of whole episodes, their questions, and rewards made of their answers."""
