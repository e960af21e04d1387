"""The rules with runbook addresses that open: ``python -m grafana.rules --docs URL FOLDER``.

In the repository ``runbook_url`` is a place in the documents. Where these can be read in a
browser, everybody decides for himself; this writes the rules with that address.
"""

from __future__ import annotations

import argparse
from pathlib import Path

RULES = Path(__file__).parent / "prometheus"
FILES = ("recording.yml", "alerts.yml")
PLACE = "runbook_url: docs/operations.md#"


def with_addresses(text: str, docs_url: str) -> str:
    """The rules of a file; ``docs_url`` is where the site of ``make docs`` begins."""
    return text.replace(PLACE, f"runbook_url: {docs_url.rstrip('/')}/docs/operations.html#")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m grafana.rules")
    parser.add_argument("--docs", required=True, help="where the site of the documents begins")
    parser.add_argument("folder", type=Path, help="where to write the rules")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        text = with_addresses((RULES / name).read_text(), options.docs)
        (options.folder / name).write_text(text)


if __name__ == "__main__":
    main()
