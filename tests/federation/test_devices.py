"""The precision of a block, chosen once and used again and again."""

from __future__ import annotations

import pytest
import torch

from fedglimpse.federation.devices import numerics


def tf32_settings() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("precision", "allows"), [("fp32", False), ("tf32", True)])
def test_a_gpu_context_sets_tensor_cores_and_puts_them_back(precision, allows) -> None:
    before = tf32_settings()
    context = numerics(torch.device("cuda"), precision)
    assert tf32_settings() == before
    for _ in range(2):
        with context:
            assert tf32_settings() == (allows, allows)
            assert not torch.is_autocast_enabled("cuda")
        assert tf32_settings() == before
    with pytest.raises(ValueError, match="inside"), context:
        raise ValueError("inside")
    assert tf32_settings() == before


def test_a_cpu_context_changes_nothing_and_can_be_entered_again() -> None:
    before = tf32_settings()
    context = numerics(torch.device("cpu"), "fp32")
    for _ in range(2):
        with context:
            assert tf32_settings() == before
