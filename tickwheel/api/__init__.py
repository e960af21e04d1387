"""Every request and answer of the daemon, declared once, and the table of verbs."""
