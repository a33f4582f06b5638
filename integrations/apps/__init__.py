"""The frameworks and clients that applications are made with."""
