"""Who may connect, and how: tokens, logins and TLS."""
