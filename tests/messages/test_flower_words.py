"""What users of the Flower app read: the value, and the fix."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

from fedglimpse.errors import UserError
from fedglimpse.flower import messages as wire
from fedglimpse.flower.strategy import from_run_config


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("terms.quorum", "0.5", "quorum='0.5' must be a finite number, such as 0.5."),
        ("terms.quorum", 2.0, "quorum=2.0 is not a share: use 0 to 1, such as 0.5."),
        ("terms.min_clients", 2.5, "min_clients=2.5 must be a whole number, such as 0."),
        ("terms.min_clients", -1, "min_clients=-1 is too small: use 0 or more."),
        ("terms.qorum", 0.25, "Unknown key 'terms.qorum'. Did you mean 'quorum'?"),
        ("seed", "x", "seed='x' must be a whole number, such as 0."),
    ],
)
def test_a_wrong_term_is_named_with_its_value_and_the_fix(
    key: str, value: Any, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        from_run_config({key: value})
    assert str(caught.value) == sentence


def test_another_version_is_named_with_the_one_to_install() -> None:
    sentence = wire.version_mismatch("Client 'a'", "0.0.7")
    assert sentence is not None
    assert sentence.startswith("Client 'a' runs fedglimpse 0.0.7, but here it is ")
    assert sentence.endswith(
        f"install the same {wire.series(wire.VERSION)}.* on server and clients."
    )
