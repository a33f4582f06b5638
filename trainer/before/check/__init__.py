"""`cotune check`: a dry run of an application with drawn answers."""
