"""The structs that all rooms share: calls, candidates, episodes, tasks; their ids, plans, and who caused a failure."""
