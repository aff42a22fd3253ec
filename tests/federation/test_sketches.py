from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.federation.sketches import TILE, CountSketch, GaussianSketch, Sketch, build_sketch

SIZE = 3 * TILE + 17  # several tiles and a part of one
KINDS = pytest.mark.parametrize("kind", ["gaussian", "count"])


def rows(count: int, size: int = SIZE) -> Tensor:
    return torch.randn(count, size, generator=rng.generator(0, "test-rows"))


def close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).norm() <= 1e-5 * expected.norm())


@KINDS
def test_is_linear(kind: str) -> None:
    sketch = build_sketch(kind, SIZE)
    x, y = rows(2)
    assert close(sketch(2 * x - 3 * y), 2 * sketch(x) - 3 * sketch(y))


@KINDS
def test_norms_and_inner_products_are_nearly_kept(kind: str) -> None:
    x, y = rows(2)
    y = x + y
    sketch = build_sketch(kind, SIZE, 2048, seed=1)
    a = sketch(x)
    b = sketch(y)
    assert abs(a.norm() / x.norm() - 1) < 0.06  # four standard errors, 1 / sqrt(2 D)
    assert abs((a @ b) / (x @ y) - 1) < 0.15


@KINDS
def test_inner_products_are_unbiased_over_seeds(kind: str) -> None:
    x, y = rows(2, 300)
    y = x + 0.5 * y
    products = [
        float(s(x) @ s(y)) for s in (build_sketch(kind, 300, 16, seed) for seed in range(300))
    ]
    error = torch.tensor(products).std() / 300**0.5
    assert abs(sum(products) / 300 - float(x @ y)) < 4 * error
    assert error < 0.05 * float(x @ y)


@KINDS
def test_same_seed_same_sketch(kind: str) -> None:
    x = rows(1)[0]
    assert torch.equal(build_sketch(kind, SIZE, seed=3)(x), build_sketch(kind, SIZE, seed=3)(x))
    assert not close(build_sketch(kind, SIZE, seed=4)(x), build_sketch(kind, SIZE, seed=3)(x))


@KINDS
def test_batches_of_any_shape_equal_single_rows(kind: str) -> None:
    sketch = build_sketch(kind, SIZE, 32)
    many = rows(40).view(2, 20, SIZE)  # more rows than a chunk
    out = sketch(many)
    assert out.shape == (2, 20, 32)
    assert out.dtype == torch.float32
    for i, j in ((0, 0), (0, 19), (1, 13)):
        assert close(sketch(many[i, j]), out[i, j])
    assert sketch(rows(0)).shape == (0, 32)


@pytest.mark.parametrize("block", [1, 2, 3, 100])
@pytest.mark.parametrize("cached", [False, True])
def test_block_size_and_cache_do_not_change_a_bit(block: int, cached: bool) -> None:
    x = rows(1)[0]
    usual = GaussianSketch(SIZE)(x)
    assert torch.equal(GaussianSketch(SIZE, cached=cached, block=block)(x), usual)


def test_cache_agrees_on_batches() -> None:
    x = rows(5)
    assert close(GaussianSketch(SIZE, cached=True)(x), GaussianSketch(SIZE)(x))


def test_gaussian_matrix_is_standard_normal_without_repeated_tiles() -> None:
    matrix = GaussianSketch(SIZE, 32, cached=True)._drawn_matrix()  # [d, D]
    assert matrix.shape == (SIZE, 32)
    assert abs(float(matrix.mean())) < 0.02
    assert abs(float(matrix.var()) - 1) < 0.03
    assert not torch.equal(matrix[:TILE], matrix[TILE : 2 * TILE])
    x = rows(1)[0]
    exact = (x.double() @ matrix.double()) / 32**0.5
    assert close(GaussianSketch(SIZE, 32)(x).double(), exact)


def test_a_longer_state_only_adds_columns() -> None:
    x = rows(1)[0]
    padded = torch.cat([x, torch.zeros(5000)])
    assert close(GaussianSketch(SIZE + 5000)(padded), GaussianSketch(SIZE)(x))


def test_mean_scale_is_the_paper_s_factor() -> None:
    x = rows(1)[0]
    mean = GaussianSketch(SIZE, 64, scale="mean")(x)
    root = GaussianSketch(SIZE, 64)(x)
    assert close(mean, root / 8)


def test_count_sketch_by_hand() -> None:
    sketch = CountSketch(50, 7, seed=2)
    columns = sketch(torch.eye(50))  # [50, 7]
    assert columns.abs().sum(1).eq(1).all()  # one bucket each, with a sign
    assert columns.sum(1).min() == -1
    assert columns.sum(1).max() == 1
    assert columns.abs().sum(0).gt(0).all()
    x = rows(1, 50)[0]
    assert close(sketch(x), x @ columns)


def test_count_sketch_is_its_definition() -> None:
    bits = rng.hashed(torch.tensor([rng.key(5, "count-sketch")]), 0, SIZE)[0]
    signs = torch.where(bits & 1 == 1, 1.0, -1.0)
    x = rows(1)[0]
    plain = torch.zeros(16).index_add_(0, (bits >> 1) % 16, signs * x)
    assert close(CountSketch(SIZE, 16, seed=5)(x), plain)


def test_count_sketch_buckets_and_signs_are_even_and_independent() -> None:
    index, sign = CountSketch(20_000, 16)._table(torch.device("cpu"))
    assert sorted(index[sign != 0].tolist()) == list(range(20_000))
    counts = (sign != 0).sum(1)
    assert ((counts - 1250) ** 2 / 1250).sum() < 37.7  # chi-square, 15 degrees, p = 0.001
    assert (sign.sum(1).abs() < 4 * 1250**0.5).all()


@pytest.mark.gpu
@KINDS
def test_gpu_agrees_with_cpu(kind: str) -> None:
    x = rows(3)
    for sketch in (build_sketch(kind, SIZE), build_sketch(kind, SIZE, cached=True)):
        out = sketch(x.cuda())
        assert out.is_cuda
        assert close(out.cpu(), sketch(x))


def test_rows_of_another_length_are_refused() -> None:
    sketch: Sketch = CountSketch(10)
    with pytest.raises(ValueError, match="rows have 9 floats"):
        sketch(torch.zeros(9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_models_of_other_floats_are_sketched_too(dtype: torch.dtype) -> None:
    sketch = GaussianSketch(SIZE, 8)
    wide = rows(3).to(dtype)
    assert torch.equal(sketch(wide), sketch(wide.float()))
