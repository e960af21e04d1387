"""Real Spark over histories made by hand and by daemons; ``run`` is what `make report` starts."""
