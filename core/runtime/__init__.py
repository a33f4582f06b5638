"""Living inside an application: its threads, event loops, forks, signals and end."""
