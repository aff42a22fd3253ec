"""One torch thread for every test, and quick compression of the studies that tests write."""

import gzip
from functools import partial

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _quick_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gzip, "compress", partial(gzip.compress, compresslevel=1))
