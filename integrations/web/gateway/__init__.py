"""The gateway between an application in any language and its provider."""
