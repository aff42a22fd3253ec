"""The device of a run and its numeric precision; where a lane's bits must not depend on others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

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


@contextmanager
def numerics(device: torch.device, precision: Precision) -> Iterator[None]:
    """Run the block in `precision`; settings outside it stay as they were."""
    if device.type == "cpu":
        yield
        return
    matmul = torch.backends.cuda.matmul.allow_tf32
    cudnn = torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = cudnn


def keeps_lanes_separate(device: torch.device) -> bool:
    """True where every lane is computed separately, with the bits of a run on its own."""
    return device.type in SEPARATE_LANES
