"""What the daemon says over HTTP: health, readiness, metrics."""
