"""The daemon's HTTP server: health, readiness, metrics, the API and the console."""
