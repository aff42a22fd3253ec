from __future__ import annotations

import pytest
from torch import nn

from fedglimpse.federation import models as nets
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.trainers.objectives import blocks_of, layer_of, serpentine, training_only


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_block_is_a_weight_layer_and_its_norm(norm: nets.Norm) -> None:
    assert blocks_of(nets.har_mlp(norm)) == [("0", "2"), ("3", "5"), ("6",)]
    assert blocks_of(nets.digits_mlp(norm)) == [("1", "3"), ("4",)]
    assert blocks_of(nets.fashion_cnn(norm)) == [("0", "2"), ("4", "6"), ("9",), ("10",)]
    assert len(blocks_of(nets.cifar_cnn(norm))) == 8


@pytest.mark.parametrize("build", [nets.cifar_cnn, nets.fashion_cnn, nets.har_mlp])
def test_every_tensor_is_in_exactly_one_block(build: type) -> None:
    model = build("batch")
    names = [name for block in blocks_of(model) for name in block]
    assert len(names) == len(set(names))
    assert {layer_of(e.name) for e in Layout.of(model).entries} == set(names)


def test_odd_models_have_blocks_too() -> None:
    nested = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    assert blocks_of(nested) == [("0", "1.0"), ("1.1",)]  # a norm in front joins the first block
    assert blocks_of(nn.Linear(2, 2)) == [("",)]
    assert layer_of("weight") == ""


def test_the_snake_goes_up_and_down() -> None:
    assert [serpentine(v, 3) for v in range(14)] == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0, 0, 1]
    assert [serpentine(v, 1) for v in range(4)] == [0, 0, 0, 0]


def test_a_model_is_put_back_after_block_training() -> None:
    model = nets.har_mlp()
    model[0].bias.requires_grad_(False)  # the user's own choice
    with training_only(model.train(), ("3", "5")):
        trains = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trains == {"3.weight", "3.bias", "5.weight", "5.bias"}
        assert not model[2].training
        assert model[5].training
    assert all(m.training for m in model.modules())
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["0.bias"]
