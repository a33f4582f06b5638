"""Replay: a workflow run again, with the calls before a fork answered from the record."""
