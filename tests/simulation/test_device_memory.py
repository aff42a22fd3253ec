"""Work is cut into smaller pieces when memory runs out."""

from __future__ import annotations

import pytest
import torch

from fedglimpse.config.checks import check
from fedglimpse.config.loading import resolve
from fedglimpse.errors import UserError
from fedglimpse.federation.models import cifar_cnn, har_mlp
from fedglimpse.simulation.cuda.memory import bytes_per_job, smaller_until_it_fits


def test_halves_until_it_fits_and_releases_in_between() -> None:
    sizes, released = [], []

    def attempt(size: int) -> str:
        sizes.append(size)
        if size > 25:
            raise torch.cuda.OutOfMemoryError
        return "done"

    assert smaller_until_it_fits(attempt, 160, lambda: released.append(1)) == "done"
    assert sizes == [160, 80, 40, 20]
    assert len(released) == 3


def test_one_client_that_does_not_fit_is_an_error() -> None:
    def attempt(size: int) -> None:
        raise torch.cuda.OutOfMemoryError

    with pytest.raises(torch.cuda.OutOfMemoryError):
        smaller_until_it_fits(attempt, 2)


def test_memory_grows_with_batch_and_width() -> None:
    picture = torch.rand(1, 3, 32, 32)
    small = bytes_per_job(cifar_cnn(), picture, 32, 2)
    wide, large = (bytes_per_job(cifar_cnn(), picture, b, w) for b, w in ((32, 4), (64, 2)))
    assert small < wide == large < 2 * small
    assert bytes_per_job(har_mlp(), torch.rand(1, 561), 64, 4) < small / 5


@pytest.mark.parametrize("most", [0, -3, "many"])
def test_max_jobs_must_be_a_number_or_auto(most: int | str) -> None:
    with pytest.raises(UserError, match=f"engine.max_jobs={most}"):
        check(resolve({"engine.max_jobs": most}))
    check(resolve({"engine.max_jobs": "auto"}))
    check(resolve({"engine.max_jobs": 7}))
