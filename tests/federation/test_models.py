from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedglimpse import rng
from fedglimpse.federation.models import (
    MODELS,
    Norm,
    build_model,
    cifar_cnn,
    digits_mlp,
    fashion_cnn,
    har_mlp,
    head_entries,
)
from fedglimpse.federation.state import Layout

SHAPES = {
    "cifar10": ((3, 32, 32), 10),
    "fashion": ((1, 28, 28), 10),
    "har": ((561,), 6),
    "hapt": ((561,), 12),
    "digits": ((1, 8, 8), 10),
    "synthetic": ((20,), 4),
}


@pytest.mark.parametrize(
    ("model", "size"), [(cifar_cnn, 552_362), (fashion_cnn, 315_530), (har_mlp, 179_078)]
)
def test_states_have_the_size_of_the_release(model: object, size: int) -> None:
    assert Layout.of(model()).size == size  # type: ignore[operator]


def test_cifar_layers_come_in_the_order_of_the_release() -> None:
    kinds = [type(layer).__name__ for layer in cifar_cnn()]
    assert kinds[:7] == ["Conv2d", "ReLU", "BatchNorm2d"] * 2 + ["MaxPool2d"]
    assert kinds[-3:] == ["Flatten", "Linear", "Linear"]


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", MODELS)
def test_every_dataset_has_a_stackable_model(name: str, norm: Norm) -> None:
    shape, classes = SHAPES[name]
    with rng.isolated(0, "model"):
        model = build_model(name, norm, shape, classes)
    assert isinstance(model, nn.Sequential)
    assert model.training
    assert model(torch.zeros(2, *shape)).shape == (2, classes)
    layout = Layout.of(model)
    assert bool(layout.buffers) == (norm == "batch")


def test_group_norm_has_8_groups_and_the_same_parameters() -> None:
    groups = {m.num_groups for m in cifar_cnn("group").modules() if isinstance(m, nn.GroupNorm)}
    assert groups == {8}
    assert Layout.of(cifar_cnn("group")).num_params == Layout.of(cifar_cnn("batch")).num_params


def test_weights_depend_only_on_the_isolated_seed() -> None:
    states = []
    for seed in (0, 0, 1):
        with rng.isolated(seed, "model"):
            model = build_model("digits", "batch", (1, 8, 8), 10)
        states.append(Layout.of(model).read(model))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_checking_the_fit_leaves_batch_statistics_alone() -> None:
    model = build_model("digits", "batch", (1, 8, 8), 10)
    assert model.get_buffer("3.running_mean").eq(0).all()
    assert model.get_buffer("3.running_var").eq(1).all()


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_head_is_the_dense_layers_after_the_last_convolution(norm: Norm) -> None:
    layout = Layout.of(build_model("cifar10", norm, (3, 32, 32), 10))
    head = head_entries(layout)
    assert sum(e.stop - e.start for e in head) == 263_562
    assert [e.shape for e in head] == [(128, 2048), (128,), (10, 128), (10,)]
    assert head[-1].stop == layout.num_params


def test_head_skips_norms_between_and_is_everything_without_convolutions() -> None:
    mixed = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert [e.name for e in head_entries(Layout.of(mixed))] == ["3.weight", "3.bias"]
    layout = Layout.of(digits_mlp())
    assert head_entries(layout) == layout.params


def test_a_users_factory_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n"
        "def tiny():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    model = build_model("own_net:tiny", "batch", (1, 8, 8), 10)
    assert Layout.of(model).size == 650
