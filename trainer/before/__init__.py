"""Looks at a run before work starts: check, doctor, preflight."""
