"""CrewAI: which agent, task or flow method makes a call."""
