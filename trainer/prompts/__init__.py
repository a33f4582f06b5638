"""`cotune prompts improve`: a search for better prompts, by role."""
