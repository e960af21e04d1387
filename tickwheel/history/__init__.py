"""Delivery history: what happened to every task, as files that anybody can read.

``lines`` defines the format, and ``segments`` the folder with its files. ``spool`` passes events
from the daemon to the ``writer`` process. ``read`` searches the files, and ``restore`` builds a new
store from them. Only ``daemon`` runs in the daemon.
"""
