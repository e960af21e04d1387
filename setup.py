"""Puts the files of ``deploy/`` and ``grafana/`` into the wheel, for ``tickwheel deploy-files``.
Everything else is in pyproject.toml."""

from pathlib import Path
from runpy import run_path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
DEPLOYMENT = run_path(str(ROOT / "tickwheel" / "deployment.py"))


class WithDeployment(build_py):
    """Copies them beside the modules; in a clone the command reads them where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        packed = Path(self.build_lib) / "tickwheel" / DEPLOYMENT["PACKED"]
        for name, path in DEPLOYMENT["clone_files"](ROOT).items():
            (packed / name).parent.mkdir(parents=True, exist_ok=True)
            copyfile(path, packed / name)


setup(cmdclass={"build_py": WithDeployment})
