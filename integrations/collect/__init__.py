"""The collector: batches of many applications, and OTLP, into one store."""
