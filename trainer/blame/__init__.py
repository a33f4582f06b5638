"""`cotune blame`: which role of an application loses the episodes, found by running the alternatives."""
