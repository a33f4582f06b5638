"""LangChain's runs, models, messages and middleware."""
