from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedglimpse.errors import UserError
from fedglimpse.runs.kept_models import kept_models, load_models, save_models


def test_models_come_back_in_the_order_of_rounds(tmp_path: Path) -> None:
    states = torch.randn(2, 5)
    for round_num in (20, 0, 1_000_000, 3):
        save_models(tmp_path, round_num, states + round_num)
    assert list(kept_models(tmp_path)) == [0, 3, 20, 1_000_000]
    torch.testing.assert_close(load_models(kept_models(tmp_path)[3]), states + 3)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    save_models(tmp_path, 1, torch.zeros(1, 2))
    (tmp_path / "models" / "round-best.pt").write_text("mine")
    assert list(kept_models(tmp_path)) == [1]
    assert not kept_models(tmp_path / "elsewhere")


@pytest.mark.parametrize("content", [b"not a file of torch", None])
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    path = save_models(tmp_path, 1, torch.zeros(1, 2))
    if content is None:
        torch.save({"a": 1}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match="round-000001"):
        load_models(path)


def test_saving_again_replaces(tmp_path: Path) -> None:
    save_models(tmp_path, 1, torch.zeros(1, 2))
    path = save_models(tmp_path, 1, torch.ones(1, 2))
    assert float(load_models(path).sum()) == 2.0
    assert [p.name for p in path.parent.iterdir()] == [path.name]
