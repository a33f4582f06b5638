"""A run from its folder: opened, checkpointed, resumed, started from another one."""
