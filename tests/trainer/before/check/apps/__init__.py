"""Small applications in the style of public projects, each with what a dry run should say of it."""
