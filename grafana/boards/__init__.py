"""The dashboards as tables; ``grafana.generate`` makes JSON of them."""
