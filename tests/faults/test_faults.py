"""The campaigns of faults, each in a short form; `make faults` tries every case."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaigns import CAMPAIGNS, Campaign

SHARES = {"power_loss_in_a_sweep": 0.01, "failing_disk": 0.03}  # of the cases; the slower ones
SHARE = 0.04


@pytest.mark.parametrize("campaign", CAMPAIGNS, ids=lambda campaign: campaign.__name__)
def test_no_fault_loses_or_changes_results(campaign: Campaign, tmp_path: Path) -> None:
    tries = campaign(tmp_path, SHARES.get(campaign.__name__, SHARE))
    assert tries.number
    assert not tries.failures
