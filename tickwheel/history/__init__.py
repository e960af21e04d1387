"""Delivery history: what happened to every task, as files that anybody can read.

``lines`` is the format, ``segments`` the folder with its files, ``spool`` the way from the daemon
to the ``writer`` process, ``read`` the questions to the files, ``restore`` a new store from them.
``daemon`` is the daemon's end; nothing else here needs a running daemon.
"""
