"""What leaves the daemon for other systems: groups whose consumer is a target instead of a program.

A ``Target`` (``target.py``) takes deliveries and says what becomes of each; a ``Runner``
(``runner.py``) is an ordinary subscriber that hands it what comes due and settles it. So a target
has retries, dead letters, order, rates, pauses and filters without a line of its own. Each kind of
target is a module, imported when a URL names it; what it needs is an extra.

Client-side code: it speaks to its daemon as every subscriber does, and imports nothing of it.
"""
