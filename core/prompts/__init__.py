"""The prompts of an application's roles: found in recorded calls, kept in a file, and edited where calls pass."""
