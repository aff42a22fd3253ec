"""All clients of a round at once: J models trained by one stack of batched operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.layout import Layout
from fedglimpse.sim.jobs import Examples, Jobs, Recipe, Trained, batch_counts, steps_per_epoch
from fedglimpse.sim.precision import Precision, numerics
from fedglimpse.sim.stacked import StackedModel
from fedglimpse.sim.stacked_optim import StackedOptimizer


class BatchedTrainer:
    """Trains all jobs of all lanes together; agrees with `SerialTrainer`.

    Jobs are sorted by size, so that those still training at a given step are always the first
    ones: shorter clients drop off the end of the stack instead of being masked out.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        recipe: Recipe,
        precision: Precision = "fp32",
    ) -> None:
        """Take the structure of `model`; raises UserError where it cannot be stacked."""
        self.stacked = StackedModel(model)
        self.layout = Layout.of(model)
        self.examples, self.recipe, self.precision = examples, recipe, precision

    def train(self, start: Tensor, jobs: Jobs) -> Trained:
        """Train every job; the answer is in the order of `jobs`."""
        if len(jobs) == 0:
            empty = torch.zeros(0, device=start.device)
            return Trained(start.new_zeros(0, self.layout.size), empty, empty.long())
        by_size = torch.argsort(jobs.sizes, descending=True, stable=True)
        jobs = jobs.pick(by_size)
        state = {n: v[jobs.lane] for n, v in self.layout.unpack(start).items()}
        names = [e.name for e in self.layout.params]
        optimizer = StackedOptimizer([state[n] for n in names], self.recipe, jobs)
        loss, steps = torch.zeros(len(jobs), device=start.device), torch.zeros_like(jobs.sizes)
        sizes = jobs.sizes.cpu()
        for epoch in range(self.recipe.epochs):
            rows, draws = self.examples.order(jobs, epoch)
            for step in range(steps_per_epoch(sizes, self.recipe.batch_size)):
                counts = batch_counts(sizes, step, self.recipe.batch_size)
                active, width = int((counts > 0).sum()), int(counts.max())
                if active == 0:
                    continue
                part = (slice(active), slice(step * self.recipe.batch_size, None))
                rows_now = rows[part][:, :width]
                draws_now = None if draws is None else draws[part][:, :width]
                x, y = self.examples.batch(rows_now, draws_now)
                live = {n: v[:active] for n, v in state.items()}
                now, grads = self._gradients(x, y, live, names, counts[:active])
                optimizer.step(grads)
                loss[:active] += now
                steps[:active] += 1
        back = torch.argsort(by_size)
        return Trained(
            self.layout.pack(state)[back], (loss / steps.clamp(min=1))[back], steps[back]
        )

    def _gradients(
        self, x: Tensor, y: Tensor, live: dict[str, Tensor], names: list[str], counts: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return each job's mean loss `[A]` and the gradients of its parameters."""
        width = x.shape[1]
        counts = counts.to(x.device)
        ragged = bool((counts < width).any())
        valid = torch.arange(width, device=x.device) < counts[:, None] if ragged else None
        leaves = {n: live[n].detach().requires_grad_() for n in names}
        with numerics(x.device, self.precision):
            logits = self.stacked.forward(x, {**live, **leaves}, valid)  # [A, B, C]
            each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        each = each.view(y.shape)
        if valid is not None:
            each = each * valid
        loss = each.sum(1) / counts  # [A]
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
        return loss.detach(), list(grads)
