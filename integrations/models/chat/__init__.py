"""From chat requests to token ids, and from sampled ids to messages: templates, tool calls, grammars."""
