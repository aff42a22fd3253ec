"""`aggregate.everywhere`: the same averaging over time for methods that would merge plainly."""

from __future__ import annotations

from fedglimpse.runs.experiment import run
from mistakes import mistake

SMALL = {"data.name": "digits", "rounds": 4, "aggregate.everywhere": True}


def without_time(records: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def test_fedavg_everywhere_averaged_is_fedavg_window() -> None:
    averaged = run({**SMALL, "method": "fedavg"}).records
    window_records = run(
        {**SMALL, "method": "fedavg-window", "aggregate.everywhere": False}
    ).records
    plain = run({**SMALL, "method": "fedavg", "aggregate.everywhere": False}).records
    assert without_time(averaged) == without_time(window_records)
    assert without_time(averaged) != without_time(plain)


def test_a_method_that_averages_already_stays_as_it_is() -> None:
    records = [
        without_time(run({**SMALL, "method": "glimpse", "aggregate.everywhere": on}).records)
        for on in (True, False)
    ]
    assert records[0] == records[1]


def test_a_method_with_its_own_merge_is_refused() -> None:
    with mistake("aggregate.everywhere"):
        run({**SMALL, "method": "fedawac"})
