"""Models: folders, chat templates, and the samplers that answer with them."""
