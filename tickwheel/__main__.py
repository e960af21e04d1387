"""``python -m tickwheel`` is the ``tickwheel`` command."""

import sys

from tickwheel.cli import main

if __name__ == "__main__":
    sys.exit(main())
