"""Requests to operations: each handler decodes, calls one operation, and encodes its answer."""
