"""Samplers: the in-process one on transformers, and vLLM."""
