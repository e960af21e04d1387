"""What another daemon wrote, perhaps of an older release, opened and served by this one."""
