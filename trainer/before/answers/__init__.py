"""Answers without a model: drawn from the request's schema, tools and prompt, or read from recorded calls."""
