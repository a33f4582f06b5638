"""The reports of a run: metrics, the lines of its steps, the summary."""
