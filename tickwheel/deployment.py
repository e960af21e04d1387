"""The files of ``deploy/`` and ``grafana/``, which run and monitor a daemon.

``setup.py`` uses this module to copy them into the package's wheel; a clone uses the originals. The
module needs only the standard library and imports nothing of the package when it is loaded, because
the package is not yet installed during a build.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

PACKED: Final = "deployment_files"
"""Folder of the copies, next to the modules of an installed package."""
FOLDERS: Final = ("deploy", "grafana")
DOCKERFILE: Final = "deploy/Dockerfile"


def clone_files(root: Path) -> dict[str, Path]:
    """Return the path of each file by its name relative to the root of a clone, except the programs
    that generate the dashboards."""
    return {
        path.relative_to(root).as_posix(): path
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*"))
        if path.is_file()
        and "__pycache__" not in path.parts
        and not (folder == "grafana" and path.suffix == ".py")
    }


def files() -> dict[str, bytes]:
    """Return the contents of each file by its name, changed so that no clone is needed."""
    package = Path(__file__).resolve().parent
    packed = package / PACKED
    if packed.is_dir():
        paths = {p.relative_to(packed).as_posix(): p for p in packed.rglob("*") if p.is_file()}
    else:
        paths = clone_files(package.parent)
    contents = {name: path.read_bytes() for name, path in paths.items()}
    if DOCKERFILE in contents:
        contents[DOCKERFILE] = _without_a_clone(contents[DOCKERFILE].decode()).encode()
    return contents


def _without_a_clone(dockerfile: str) -> str:
    """Return a Dockerfile that installs this release instead of the clone's source."""
    from tickwheel.version import __version__

    lines = [
        line
        for line in dockerfile.splitlines(keepends=True)
        if not line.startswith("COPY ") or line.startswith("COPY --from=")
    ]
    text = "".join(lines).replace('".[all]"', f'"tickwheel[all]=={__version__}"')
    return text.replace("# The context is the repository. ", "# ")
