"""A real daemon that is killed, cut off from power, or given a disk that is full or fails."""
