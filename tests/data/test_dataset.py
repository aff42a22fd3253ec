import pytest
import torch
from torch.nn import functional as F

from fedglimpse.data.dataset import Dataset, as_input, crop_and_flip
from mistakes import mistake


def make(**changes):
    fields = {
        "name": "toy",
        "label": "Toy",
        "x_train": torch.zeros(6, 1, 4, 4, dtype=torch.uint8),
        "y_train": torch.arange(6) % 2,
        "x_test": torch.zeros(2, 1, 4, 4, dtype=torch.uint8),
        "y_test": torch.arange(2),
        "num_classes": 2,
        "subjects": torch.arange(6),
    }
    return Dataset(**{**fields, **changes})


def crop_one_by_one(images, offsets, flips, pad):
    height, width = images.shape[2:]
    out = []
    for image, (top, left), flip in zip(images, offsets.tolist(), flips.tolist(), strict=True):
        cropped = F.pad(image, (pad,) * 4)[:, top : top + height, left : left + width]
        out.append(cropped.flip(2) if flip else cropped)
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("height", "width", "pad"), [(32, 32, 4), (5, 7, 2), (3, 3, 3)])
def test_crop_and_flip_equals_the_plain_loop(dtype, height, width, pad):
    draw = torch.Generator().manual_seed(3)
    images = torch.randint(1, 256, (40, 3, height, width), generator=draw).to(dtype)
    offsets = torch.randint(2 * pad + 1, (40, 2), generator=draw)
    offsets[:2] = torch.tensor([[0, 0], [2 * pad, 2 * pad]])
    flips = torch.rand(40, generator=draw) < 0.5
    before = images.clone()
    out = crop_and_flip(images, offsets, flips, pad)
    assert out.dtype == dtype
    assert torch.equal(out, crop_one_by_one(images, offsets, flips, pad))
    assert torch.equal(images, before)


def test_no_shift_and_no_flip_changes_nothing():
    images = torch.rand(5, 3, 8, 8)
    same = crop_and_flip(images, torch.full((5, 2), 4), torch.zeros(5, dtype=torch.bool))
    assert torch.equal(same, images)


def test_as_input_scales_bytes_and_leaves_floats():
    bytes_ = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    assert torch.equal(as_input(bytes_), torch.tensor([[0.0, 0.2, 1.0]]))
    floats = torch.tensor([[-3.0, 300.0]])
    assert as_input(floats) is floats


def test_the_rows_of_a_dataset_become_inputs():
    bytes_ = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    labels = torch.zeros(1, dtype=torch.long)
    dataset = Dataset("own", "own", bytes_, labels, bytes_, labels, num_classes=2).as_inputs()
    assert torch.equal(dataset.x_train, torch.tensor([[0.0, 0.2, 1.0]]))
    assert torch.equal(dataset.x_test, dataset.x_train)


def test_dataset_moves_and_describes_itself():
    moved = make().to("cpu")
    assert moved.input_shape == (1, 4, 4)
    assert moved.subjects is not None
    assert make(subjects=None).to("meta").x_train.device.type == "meta"


@pytest.mark.parametrize("changes", [{"y_train": torch.zeros(5)}, {"subjects": torch.zeros(7)}])
def test_inconsistent_training_rows_are_refused(changes):
    with mistake("data.name"):
        make(**changes)


def test_inconsistent_test_rows_are_refused():
    with mistake("data.name"):
        make(y_test=torch.zeros(3))
