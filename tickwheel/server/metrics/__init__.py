"""Every metric of the daemon, and the text of ``/metrics``."""
