"""Tickwheel in the hands of frameworks: a module for each, which imports that framework. Nothing
else of Tickwheel imports these."""
