"""Trained role weights: versions, publishing, fingerprints, export, hand-back, serving."""
