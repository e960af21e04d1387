"""The metrics of the daemon and the text of ``/metrics``."""
