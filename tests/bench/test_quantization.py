"""The texts that `trouper bench quantization` compares on."""

from pathlib import Path

import trouper
from trouper.bench.studies.models.quantization import FILES


def test_every_text_is_there():
    assert all((Path(trouper.__file__).parent / name).is_file() for name in FILES)
