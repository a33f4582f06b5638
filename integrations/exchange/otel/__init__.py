"""OpenTelemetry: episodes as spans, and spans of other tools as records."""
