"""What an older daemon wrote, opened and served by this one."""
