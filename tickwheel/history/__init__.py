"""Delivery history: what happened to every task, as files that anybody can read."""
