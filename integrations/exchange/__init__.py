"""Other tools that cotune hands data to and takes it from."""
