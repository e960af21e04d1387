"""The msgpack protocol over TCP, which maps frames to operations and back."""
