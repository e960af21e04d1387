"""What spark-submit is given: ``spark-submit …/tickwheel/reports/submit.py --history … --out …``.

spark-submit runs a file, not a module: it puts the file's own folder on the path instead of the
folder that holds the package. Where the package lies elsewhere (``--py-files``), it is found there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)
    from tickwheel.reports.job import main

    sys.exit(main())
