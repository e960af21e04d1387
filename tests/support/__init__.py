"""Rigs, fakes and real servers that tests of several folders share."""
