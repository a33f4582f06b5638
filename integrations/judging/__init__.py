"""Judges that ask a model: of an OpenAI-compatible endpoint, or a role of the application."""
