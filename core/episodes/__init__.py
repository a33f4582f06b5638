"""One run of an application on a task: workflows, episodes, tracing, rollouts."""
