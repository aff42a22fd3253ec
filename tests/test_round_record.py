"""`RoundRecord`: one record for simulator, Flower, readers and docs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedglimpse.types import RECORD_FIELDS, RoundRecord

DOCS = Path(__file__).parents[1] / "docs"

LINE: dict[str, Any] = {
    "lane": 0, "seed": 3, "round": 7, "visible": [1, 2], "selected": [2], "rejected": [],
    "weights": [1.0], "accuracy": 0.5, "macro_f1": 0.4, "per_class_f1": [0.4], "loss": 1.5,
    "train_loss": None, "reward": 0.3, "epsilon": 0.1, "q": [1.0, 2.0], "uplink_bytes": 4,
    "downlink_bytes": 5, "client_flops": 6, "server_flops": 7, "seconds": 0.25,
}  # fmt: skip


def with_entries(**entries: Any) -> dict[str, Any]:
    return {**LINE, **entries}


def test_a_line_survives_reading_and_writing_with_its_order() -> None:
    record = RoundRecord.from_json(LINE)
    assert record.extra == {"epsilon": 0.1, "q": [1.0, 2.0]}
    assert json.dumps(record.to_json()) == json.dumps(LINE)


def test_fields_of_some_runs_are_written_only_there() -> None:
    flower = {"failed": {"4": "timeout"}, "received_bytes_chosen": 8, "received_bytes_others": 0}
    for entries in flower, {"oracle": True}:
        line = with_entries(**entries)
        record = RoundRecord.from_json(line)
        assert record.extra == {"epsilon": 0.1, "q": [1.0, 2.0]}
        assert record.to_json() == line
    assert not {*flower, "oracle"} & RoundRecord.from_json(LINE).to_json().keys()


def test_lines_of_old_runs_are_read() -> None:
    old = {name: LINE[name] for name in LINE if name not in ("weights", "per_class_f1", "loss")}
    assert RoundRecord.from_json(old).loss is None


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ([], "table"),
        (None, "table"),
        ({name: LINE[name] for name in LINE if name != "reward"}, "`reward`"),
        (with_entries(seed="3"), "`seed`"),
        (with_entries(round=-1), "`round`"),
        (with_entries(visible=[1, "2"]), "`visible`"),
        (with_entries(accuracy="high"), "`accuracy`"),
        (with_entries(seconds=None), "`seconds`"),
        (with_entries(uplink_bytes=float("inf")), "`uplink_bytes`"),
    ],
)
def test_what_is_no_record_is_named(line: object, field: str) -> None:
    with pytest.raises(ValueError) as caught:
        RoundRecord.from_json(line)
    assert field in str(caught.value)


def test_every_field_is_explained_in_the_docs() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    explained = set(re.findall(r"`(\w+)`", pages))
    assert set(RECORD_FIELDS) - {"extra"} <= explained
