"""Bridges to other projects; each is imported only by who uses it."""
