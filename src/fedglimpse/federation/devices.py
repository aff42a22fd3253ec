"""The device of a run and its numeric precision; where a lane's bits must not depend on others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from fedglimpse.errors import UserError, require

Precision = Literal["fp32", "tf32", "bf16"]

# Elsewhere one pass for all lanes saves more than identical last bits are worth.
SEPARATE_LANES = ("cpu",)


def pick_device(name: str) -> torch.device:
    """Return the device of `engine.device`, whose form `config/checks.py` has checked.

    Raises:
        UserError: for a GPU that is not here.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        require(
            gpus > 0,
            f"engine.device={name} but PyTorch sees no GPU here: use cpu or auto.",
            key="engine.device",
        )
        require(
            (device.index or 0) < gpus,
            f"engine.device={name} but there are {gpus} GPUs: use cuda:0.",
            key="engine.device",
        )
    return device


def check_precision(device: torch.device, precision: Precision) -> None:
    """Raise UserError where the device has no such precision."""
    if device.type == "cpu" and precision != "fp32":
        raise UserError(
            f"engine.precision={precision} needs a GPU, but engine.device is cpu: use fp32 there.",
            key="engine.precision",
        )


def numerics(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return a context whose block runs in `precision`; settings outside it stay as they were.

    It can be entered again and again, but not inside itself.
    """
    if device.type == "cpu":
        return nullcontext()
    return _GpuNumerics(device, precision)


class _GpuNumerics(AbstractContextManager[None]):
    """Tensor cores and bfloat16 on or off."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self._allow_tf32 = precision != "fp32"
        self._autocast = torch.autocast(
            device.type,
            dtype=torch.bfloat16,
            enabled=precision == "bf16",
        )
        self._matmul_before = False
        self._cudnn_before = False

    def __enter__(self) -> None:
        self._matmul_before = torch.backends.cuda.matmul.allow_tf32
        self._cudnn_before = torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self._allow_tf32
        torch.backends.cudnn.allow_tf32 = self._allow_tf32
        self._autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._autocast.__exit__(*error)
        torch.backends.cuda.matmul.allow_tf32 = self._matmul_before
        torch.backends.cudnn.allow_tf32 = self._cudnn_before


def keeps_lanes_separate(device: torch.device) -> bool:
    """True where every lane is computed separately, with the bits of a run on its own."""
    return device.type in SEPARATE_LANES
