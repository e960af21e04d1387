"""Sends tasks to other systems, for groups that have a target instead of subscribers.

A ``Target`` (``target.py``) sends deliveries and returns an outcome for each. A ``Runner``
(``runner.py``) is an ordinary subscriber that passes deliveries to the target and settles them. So
targets support retries, dead letters, order, rates, pauses and filters without further code. Each
kind of target is a module, which is imported when a URL names it and can need an extra.

This is client-side code: it connects to the daemon like every subscriber, and imports nothing from
it.
"""
