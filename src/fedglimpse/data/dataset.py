"""A dataset in memory, and the two pure functions that turn its rows into model input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedglimpse.errors import require


@dataclass(frozen=True, eq=False)  # compared by identity: tensors have no single ==
class Dataset:
    """Training and test rows of one dataset.

    A user's own data comes as one of these too (`data/custom.py` checks it, docs/data.md shows it).
    Images stay uint8 until a batch is used, so that CIFAR-10 takes 180 MB and not 720 MB;
    `as_input` makes them floats, and `as_inputs` those of a small dataset once and for all.
    """

    name: str
    label: str  # how results on this data are labelled, e.g. "HAPT (recomputed)"
    x_train: Tensor  # [n, channels, height, width] uint8 or [n, features] float32
    y_train: Tensor  # [n] int64, 0..num_classes-1
    x_test: Tensor  # [m, ...] like x_train
    y_test: Tensor  # [m] int64
    num_classes: int
    subjects: Tensor | None = None  # [n] int64, the person behind each training row

    def __post_init__(self) -> None:
        """Refuse values that are not tensors, and tensors that do not belong together."""
        names = ["x_train", "y_train", "x_test", "y_test"]
        if self.subjects is not None:
            names.append("subjects")
        for name in names:
            self._check_tensor(name)
        self._check_rows("y_train", "x_train")
        self._check_rows("y_test", "x_test")
        if self.subjects is not None:
            self._check_rows("subjects", "x_train")

    def _check_tensor(self, name: str) -> None:
        value = getattr(self, name)
        require(
            isinstance(value, Tensor) and value.dim() > 0,
            f"Dataset '{self.name}' has {name} of type {type(value).__name__}, not a tensor with "
            "one entry for each row: give one, such as torch.from_numpy(array).",
            key="data.name",
        )

    def _check_rows(self, name: str, examples: str) -> None:
        num_rows = len(getattr(self, name))
        num_examples = len(getattr(self, examples))
        require(
            num_rows == num_examples,
            f"Dataset '{self.name}' is inconsistent: {examples} has {num_examples} rows but {name} "
            f"has {num_rows}: give one for each row.",
            key="data.name",
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row, e.g. (3, 32, 32) or (561,)."""
        return tuple(self.x_train.shape[1:])

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same dataset with every tensor on `device`."""
        return replace(
            self,
            x_train=self.x_train.to(device),
            y_train=self.y_train.to(device),
            x_test=self.x_test.to(device),
            y_test=self.y_test.to(device),
            subjects=None if self.subjects is None else self.subjects.to(device),
        )

    def as_inputs(self) -> Dataset:
        """Return the same dataset with all rows as a model takes them."""
        return replace(self, x_train=as_input(self.x_train), x_test=as_input(self.x_test))


def as_input(x: Tensor) -> Tensor:
    """Return rows as a model takes them: uint8 images as float32 in 0..1, floats unchanged.

    There is no mean/std normalisation: the authors' release has none.
    """
    return x.to(torch.float32) / 255 if x.dtype == torch.uint8 else x


def crop_and_flip(images: Tensor, offsets: Tensor, flips: Tensor, pad: int = 4) -> Tensor:
    """Shift every image, filling up with zeros, then mirror some: CIFAR-10's augmentation.

    Nothing is drawn in here. Callers pass integers of `rng.hashed`, so that a client's batches
    are the same alone, beside other clients and on every device.

    Args:
        images: uint8 or float.  # [M, channels, H, W]
        offsets: top and left corner in the padded image, 0..2*pad; `pad` is no shift.  # [M, 2]
        flips: which images to mirror left to right, after the crop.  # [M] bool
        pad: zeros added on every side.
    """
    count, channels, height, width = images.shape
    rows = offsets[:, :1] - pad + torch.arange(height, device=images.device)  # [M, H]
    left_to_right = torch.arange(width, device=images.device).expand(count, width)  # [M, W]
    mirrored = torch.where(flips.bool()[:, None], width - 1 - left_to_right, left_to_right)
    columns = offsets[:, 1:] - pad + mirrored  # [M, W]
    row_inside = (rows >= 0) & (rows < height)  # [M, H]
    column_inside = (columns >= 0) & (columns < width)  # [M, W]
    inside = row_inside[:, :, None] & column_inside[:, None, :]  # [M, H, W]
    first_pixels = rows.clamp(0, height - 1) * width  # [M, H]
    source = first_pixels[:, :, None] + columns.clamp(0, width - 1)[:, None]  # [M, H, W]
    index = source.view(count, 1, -1).expand(count, channels, height * width)
    pixels = images.reshape(count, channels, -1)
    moved = pixels.gather(2, index).view_as(images)
    return moved.masked_fill(~inside[:, None], 0)
