"""Student's t is that of scipy.stats, and no command pays for importing that."""

from __future__ import annotations

import subprocess
import sys

import pytest
from scipy import stats

from fedglimpse.runs.summary import half_width, p_of_zero


@pytest.mark.parametrize("freedom", [1, 2, 3.7, 11, 200])
def test_it_is_that_of_scipy(freedom: float) -> None:
    assert half_width(0.3, freedom) == pytest.approx(0.3 * stats.t.ppf(0.975, freedom))
    for mean in (-2.0, -0.01, 0.0, 0.4, 30.0):
        theirs = 2 * stats.t.sf(abs(mean) / 0.3, freedom)
        assert p_of_zero(mean, 0.3, freedom) == pytest.approx(theirs)


def test_the_command_does_not_import_scipy_stats() -> None:
    code = "import sys, fedglimpse.cli.main; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
