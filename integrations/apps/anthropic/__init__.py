"""Anthropic's Messages API, as the gateway speaks it."""
