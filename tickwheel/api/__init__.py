"""What the daemon can be asked, said once: values, requests, answers and the table of verbs."""
