"""AutoGen: which agent makes a call, by object, in agentchat and core."""
