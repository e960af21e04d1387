"""The demonstration, ``tickwheel bench``, and the generator of synthetic history."""
