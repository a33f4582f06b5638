"""LangGraph: which node or agent makes a call."""
