"""What is said about a setting with a wrong value: the key, the value and the fix."""

from __future__ import annotations

import pytest

from fedglimpse.config.checks import check
from fedglimpse.config.loading import load
from fedglimpse.errors import UserError


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("selection.kk=3", "Unknown key 'selection.kk'. Did you mean 'selection.k'?"),
        ("rounds=many", "rounds='many' must be a whole number."),
        ("seeds=3", "seeds=3 must be a list, such as seeds=[0,1]."),
        ("rounds=0", "rounds=0 must be 1 or more, such as 100."),
        ("visibility.p=1.2", "visibility.p=1.2 must be in (0, 1], such as 0.1."),
        ("agent.gamma=1.0", "agent.gamma=1.0 must be in [0, 1), such as 0.9."),
        ("local.lr=0", "local.lr=0.0 must be greater than 0, such as 0.03."),
        (
            "local.optimizer=adm",
            "local.optimizer=adm is unknown. Did you mean 'adam'? Use sgd, adam.",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        check(load(None, [override]))
    assert str(caught.value) == sentence
