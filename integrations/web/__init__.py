"""Servers: HTTP, the gateway, the viewer."""
