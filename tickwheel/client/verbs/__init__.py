"""The verbs of a client by what they are about. ``client.Client`` has them all."""
