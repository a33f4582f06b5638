"""Stores over SQL: queries, transactions, the writer, and maintenance."""
