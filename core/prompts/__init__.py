"""The prompts of an application's roles: found in recorded calls, stored in a file, and edited in calls."""
