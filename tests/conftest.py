"""For all tests: repeatable Hypothesis runs, and no daemon settings from somebody's shell."""

from __future__ import annotations

import os

import hypothesis

# The seed of a failing example is printed, so that it can be repeated anywhere.
hypothesis.settings.register_profile("tickwheel", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tickwheel")

for _name in [name for name in os.environ if name.startswith("TICKWHEEL_")]:
    del os.environ[_name]
