"""The files that run and watch a daemon: those of ``deploy/`` and ``grafana/``.

A wheel has copies of them, which ``setup.py`` makes by this module; in a clone they are the
clone's own. Needs the standard library only, and imports nothing of the package when it is loaded:
a build has not installed it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

PACKED: Final = "deployment_files"
"""The folder of the copies, beside the modules of an installed package."""
FOLDERS: Final = ("deploy", "grafana")
DOCKERFILE: Final = "deploy/Dockerfile"


def of_clone(root: Path) -> dict[str, Path]:
    """Every file by its name below the root of a clone, but not the programs that make the
    dashboards."""
    return {
        path.relative_to(root).as_posix(): path
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*"))
        if path.is_file()
        and "__pycache__" not in path.parts
        and not (folder == "grafana" and path.suffix == ".py")
    }


def files() -> dict[str, bytes]:
    """What every file says, by its name, for somebody who has no clone."""
    package = Path(__file__).resolve().parent
    packed = package / PACKED
    if packed.is_dir():
        found = {p.relative_to(packed).as_posix(): p for p in packed.rglob("*") if p.is_file()}
    else:
        found = of_clone(package.parent)
    said = {name: path.read_bytes() for name, path in found.items()}
    if DOCKERFILE in said:
        said[DOCKERFILE] = _without_a_clone(said[DOCKERFILE].decode()).encode()
    return said


def _without_a_clone(dockerfile: str) -> str:
    """The Dockerfile with this release of the package in place of the clone's source."""
    from tickwheel.version import __version__

    lines = [
        line
        for line in dockerfile.splitlines(keepends=True)
        if not line.startswith("COPY ") or line.startswith("COPY --from=")
    ]
    text = "".join(lines).replace('".[all]"', f'"tickwheel[all]=={__version__}"')
    return text.replace("# The context is the repository. ", "# ")
