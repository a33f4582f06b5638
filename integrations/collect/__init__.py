"""The sender of an application's records, the collector that receives them, and records in PostgreSQL."""
