"""The msgpack protocol over TCP: bytes to operations and back."""
