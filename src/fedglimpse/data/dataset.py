"""A dataset in memory, and the two pure functions that turn its rows into model input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedglimpse.errors import UserError


@dataclass(frozen=True, eq=False)  # compared by identity: tensors have no single ==
class Dataset:
    """Training and test rows of one dataset.

    A user's own data comes as one of these too (`data/custom.py` checks it, docs/data.md shows it).
    Images stay uint8 until a batch is used, so that CIFAR-10 takes 180 MB and not 720 MB;
    `as_input` makes them floats.
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
        """Refuse what is no tensor, and tensors that do not belong together."""
        given = {name: getattr(self, name) for name in ("x_train", "y_train", "x_test", "y_test")}
        given |= {} if self.subjects is None else {"subjects": self.subjects}
        for name, value in given.items():
            if not isinstance(value, Tensor) or not value.dim():
                raise UserError(
                    f"dataset '{self.name}' has {name} of type {type(value).__name__}, not a "
                    "tensor with one entry for each row; give one, such as torch.from_numpy(array)"
                )
        rows = {"y_train": len(self.y_train)}
        if self.subjects is not None:
            rows["subjects"] = len(self.subjects)
        wrong = [f"{name} has {n}" for name, n in rows.items() if n != len(self.x_train)]
        if wrong or len(self.x_test) != len(self.y_test):
            wrong = wrong or [f"y_test has {len(self.y_test)} and x_test {len(self.x_test)}"]
            raise UserError(
                f"dataset '{self.name}' is inconsistent: x_train has {len(self.x_train)} rows but "
                f"{', '.join(wrong)}; give one label (and subject) for each row"
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


def as_input(x: Tensor) -> Tensor:
    """Return rows as a model takes them: uint8 images as float32 in 0..1, floats unchanged.

    There is no mean/std normalisation: the authors' release has none.
    """
    return x.to(torch.float32) / 255 if x.dtype == torch.uint8 else x


def crop_and_flip(images: Tensor, offsets: Tensor, flips: Tensor, pad: int = 4) -> Tensor:
    """Cut every image out of its zero-padded self, then mirror some: CIFAR-10's augmentation.

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
    across = torch.arange(width, device=images.device).expand(count, width)  # [M, W]
    across = torch.where(flips.bool()[:, None], width - 1 - across, across)
    columns = offsets[:, 1:] - pad + across  # [M, W]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
        :, None, :
    ]  # [M, H, W]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
    index = source.view(count, 1, -1).expand(count, channels, height * width)
    moved = images.reshape(count, channels, -1).gather(2, index).view_as(images)
    return moved.masked_fill(~inside[:, None], 0)
