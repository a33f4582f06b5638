"""The OpenAI SDK, its text interfaces, and the Agents SDK on top of it."""
