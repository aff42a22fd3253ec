"""Distillation from the model a client received, as part of its local loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def distillation(logits: Tensor, teacher: Tensor, temperature: Tensor) -> Tensor:
    """Return T^2 KL(softmax(teacher / T) || softmax(logits / T)) of every example.

    The factor T^2 keeps gradients at the scale of the cross-entropy for every temperature.

    Args:
        logits: of the model in training.  # [..., B, C]
        teacher: of the frozen model.  # [..., B, C]
        temperature: T.  # [...], one for each batch
    """
    heat = temperature[..., None, None]  # float32, so that bf16 logits are promoted
    ours = F.log_softmax(logits / heat, dim=-1)
    theirs = F.log_softmax(teacher / heat, dim=-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1)  # [..., B]
    return temperature[..., None].square() * kl
