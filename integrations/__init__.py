"""The outside world: a folder per foreign system, which is imported nowhere else, and only once the application has."""
