"""The file for spark-submit: ``spark-submit …/tickwheel/reports/submit.py --history … --out …``.

spark-submit runs a file, not a module, and puts the file's folder on the path. This file replaces
it with the package's parent folder. Packages from ``--py-files`` can still be imported.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)
    from tickwheel.reports.job import main

    sys.exit(main())
