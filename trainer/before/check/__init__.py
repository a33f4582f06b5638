"""`cotune check`: a dry run of an application with made-up answers."""
