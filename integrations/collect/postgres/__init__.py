"""Records in PostgreSQL, by psycopg: one store for many processes."""
