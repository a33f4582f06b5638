"""Commands that run a server until they are stopped."""
