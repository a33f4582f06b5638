"""What an application sends to a collector, the collector itself, and records in PostgreSQL."""
