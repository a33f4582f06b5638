"""From what an application does to records of its episodes, while it runs."""
