"""Build in a temporary folder; pyproject.toml has the rest.

setuptools builds in `build/` and packs whatever it finds there, so a wheel that is built after an update of the checkout would
still have the modules that the update deleted.
"""

import tempfile

from setuptools import setup
from setuptools.command.build import build

with tempfile.TemporaryDirectory() as folder:

    class CleanBuild(build):
        """Build in a folder that is new each time."""

        def finalize_options(self) -> None:
            self.build_base = folder
            super().finalize_options()

    setup(cmdclass={"build": CleanBuild})
