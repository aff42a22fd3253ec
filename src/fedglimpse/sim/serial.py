"""One client after the other with `torch.optim`: the readable trainer, and the reference.

Every other trainer must agree with this one (`tests/parity`).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.layout import Layout
from fedglimpse.sim.jobs import Examples, Jobs, Recipe, Trained, batch_counts, steps_per_epoch
from fedglimpse.sim.precision import Precision, numerics


class SerialTrainer:
    """A plain loop over clients, epochs and batches; takes any `nn.Module`."""

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        recipe: Recipe,
        precision: Precision = "fp32",
        channels_last: bool = False,
    ) -> None:
        """Keep `model` as the one instance every client trains in turn.

        Args:
            model: on the device of `examples`; its state is overwritten.
            examples: the training set.
            recipe: optimizer, batch size, epochs.
            precision: of forward and backward passes.
            channels_last: memory format of images; faster for convolutions on a CPU.
        """
        self.layout = Layout.of(model)
        self.examples, self.recipe, self.precision = examples, recipe, precision
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = cast(nn.Module, model.to(memory_format=self.format))  # type: ignore[call-overload]

    def train(self, start: Tensor, jobs: Jobs) -> Trained:
        """Train every job, one after the other."""
        states = start[jobs.lane]  # [J, d], a copy
        losses, steps = torch.zeros(len(jobs), device=start.device), torch.zeros(len(jobs))
        for j in range(len(jobs)):
            job = jobs.pick(torch.tensor([j], device=jobs.lane.device))
            self.layout.write(states[j], self.model)
            with rng.isolated(int(job.keys), "dropout"):
                losses[j], steps[j] = self._train_one(job)
            states[j] = self.layout.read(self.model)
        return Trained(states, losses, steps.long())

    def _train_one(self, job: Jobs) -> tuple[Tensor, int]:
        """Train the model in place; returns the mean batch loss and the number of steps."""
        size, batch_size = int(job.sizes), self.recipe.batch_size
        job = Jobs(**{**vars(job), "rows": job.rows[:, :size]})
        optimizer = make_optimizer(self.model, self.recipe)
        anchor = [p.detach().clone() for p in self.model.parameters()] if job.mu > 0 else []
        total, steps = torch.zeros((), device=job.keys.device), 0
        self.model.train()
        for epoch in range(self.recipe.epochs):
            rows, draws = self.examples.order(job, epoch)
            for step in range(steps_per_epoch(job.sizes, batch_size)):
                count = int(batch_counts(job.sizes, step, batch_size))
                if count == 0:
                    continue
                part = slice(step * batch_size, step * batch_size + count)
                x, y = self.examples.batch(rows[0, part], None if draws is None else draws[0, part])
                if x.dim() == 4:
                    x = x.contiguous(memory_format=self.format)
                with numerics(x.device, self.precision):
                    loss = F.cross_entropy(self.model(x), y)
                optimizer.zero_grad(set_to_none=True)
                (loss + self._pull(anchor, job) if anchor else loss).backward()
                optimizer.step()
                total, steps = total + loss.detach(), steps + 1
        return total / max(steps, 1), steps

    def _pull(self, anchor: list[Tensor], job: Jobs) -> Tensor:
        """FedProx's penalty: mu/2 ||w - W||^2, or the release's mu * sum of tensor norms."""
        away = [p - a for p, a in zip(self.model.parameters(), anchor, strict=True)]
        if bool(job.squared):
            return job.mu[0] / 2 * torch.stack([(v * v).sum() for v in away]).sum()
        return job.mu[0] * torch.stack([v.norm() for v in away]).sum()


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return a fresh optimizer, as every client has one in every round."""
    if recipe.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        model.parameters(),
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )
