"""What a run says of itself: metrics, what is shown of a step, the summary."""
