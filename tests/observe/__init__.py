"""A real Prometheus over a real daemon: what `make observe` starts, and the tests of grafana/."""
