"""Every choice of the agent in one place, and the presets that differ in them.

The defaults are preset `tuned-1`, the agent of the study; `tuned` is what came out of that. `paper`
follows the paper's text wherever it speaks, `released` the authors' program (its bugs stay fixed).
The window of temporal averaging is not here: it belongs to the aggregator, so that history, n-step
horizon and window can be set apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedglimpse.errors import UserError, nearest

REWARD_MAX = 1.0  # F1 and accuracy never exceed one


@dataclass(frozen=True)
class AgentConfig:
    """Settings of the attention Q-network agent, `agent.*` in a user's configuration."""

    # What the agent sees.
    input: str = "grad"  # sketch of the update (grad) or weights (abs); numbers (scalar, probed)
    standardise: bool = True  # z-score client features within the visible set
    normalise_history: bool = True  # running standardisation of the global sketches
    history: int = 5  # H: global sketches before the current one
    history_input: str = "models"  # past models, or the changes that led to the current one

    # The Q-network.
    d_token: int = 64  # width of a token
    heads: int = 1  # attention heads; must divide d_token
    encoder: str = "attention"  # mlp: the ablation without any attention
    spatial_attention: bool = True  # false: clients do not look at each other
    temporal_attention: bool = True  # false: the history branch is cut off
    identity: str = "table"  # client memory, Eq. (idemb): a row for each client, or hashed ids
    identity_dim: int = 32  # d_emb, floats of a client's memory
    identity_buckets: int = 4096  # rows of identity=hashed, shared by ids that collide
    identity_decay: bool = False  # weight decay on identities; it erases clients seldom seen
    advantage_context: bool = True  # the advantage head also reads the pooled visible set
    flat_start: bool = False  # advantages begin at zero: no client is preferred without evidence
    q_output: str = "scalar"  # scalar: one Q per client; per_class: one per client and class
    per_class_score: str = "mean"  # how per-class Qs rank clients: by their mean or smallest
    q_clip: str = "none"  # how to bound abs(Q) by r_max / (1 - gamma), if at all

    # Learning.
    reward: str = "level"  # learn from the score itself, or from its change: see `agent/reward.py`
    n_step: int = 5  # rewards in a target before bootstrapping
    gamma: float = 0.9  # discount of later rewards
    tau: float = 0.005  # soft update of the target network, after every mini-batch
    buffer: int = 600  # rounds the replay store holds
    reset_on_gap: bool = False  # true: no n-step return across missing round numbers
    batch_size: int = 32  # transitions in a mini-batch
    updates_per_round: int = 5  # b: mini-batches after every round
    targets_once: bool = True  # targets of all b mini-batches from the networks before the first
    learn_start: int = 32  # first update once so many transitions can be sampled
    optimizer: str = "adam"  # of the Q-network
    lr: float = 1e-3  # learning rate of the Q-network
    weight_decay: float = 1e-4  # of the Q-network; on identities only with identity_decay
    grad_clip: float = 1.0  # largest gradient norm; 0 switches clipping off
    loss: str = "smooth_l1"  # between Q and its target
    aux_weight: float = 0.0  # weight of predicting the global model's proxy class histogram
    frozen: bool = False  # act greedily and never learn

    # Exploration.
    exploration: str = "all"  # what is random: all of a set, or partial_random picks of it
    epsilon_decay: float = 0.005  # e in max(epsilon_min, 1 - e t), exploring in round t
    epsilon_min: float = 0.1  # least probability of exploring in a round
    partial_random: int = 2  # m: random picks of the partial rule
    turns: float = 0.0  # weight of how seldom a client was chosen, where Q is noise
    loss_lean: float = 0.0  # weight of the loss at a client, exploring and where Q is noise
    prove: bool = False  # explore until Q has told apart sets that were drawn by lot

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                hint = nearest(str(value), allowed)
                raise UserError(
                    f"agent.{name}={value!r} is unknown.{hint} Use {', '.join(allowed)}."
                )
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise UserError(f"agent.{name} is {getattr(self, name)}; it must be >= {least}.")
        if self.d_token % self.heads:
            raise UserError(
                f"agent.heads is {self.heads}, which does not divide agent.d_token {self.d_token}."
            )
        for name, (zero, one) in SHARES.items():
            value = getattr(self, name)
            if not (0 <= value <= 1) or (value == 0 and not zero) or (value == 1 and not one):
                ends = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
                raise UserError(f"agent.{name} is {value}; it must lie in {ends}.")
        if not self.lr > 0:
            raise UserError(f"agent.lr is {self.lr}; it must be above 0.")
        if self.buffer <= self.n_step + self.history:
            raise UserError(
                f"agent.buffer is {self.buffer}; it must exceed agent.n_step + agent.history = "
                f"{self.n_step + self.history}, or nothing can be sampled."
            )

        if self.prove and self.exploration != "all":
            raise UserError(
                f"agent.prove=true needs agent.exploration=all, not {self.exploration}: Q is held "
                "against sets that were drawn by lot."
            )
        if self.shows_changes and not self.normalise_history:
            raise UserError(
                "agent.history_input=changes needs agent.normalise_history=true: changes are shown "
                "on a scale of their own."
            )

    @property
    def shows_changes(self) -> bool:
        """True where the network sees changes of the global model, not past models."""
        return self.history_input == "changes"

    @property
    def reads_sketches(self) -> bool:
        """True where a client is seen by a sketch, not by a few numbers."""
        return self.input in SKETCHES

    @property
    def q_bound(self) -> float | None:
        """Largest return the reward allows, or None where Q is not clipped."""
        return None if self.q_clip == "none" else REWARD_MAX / (1.0 - self.gamma)

    @property
    def needs(self) -> frozenset[str]:
        """What the selector must be shown, see `fedglimpse.federation.reports`."""
        extra = {"proxy_histogram"} if self.aux_weight > 0 else set()
        extra |= {"loss"} if self.loss_lean else set()
        return frozenset({*CLIENT_REPORTS[self.input], "global_sketch", "reward", *extra})


SKETCHES: dict[str, str] = {"grad": "delta_sketch", "abs": "sketch"}
NUMBERS: dict[str, tuple[str, ...]] = {  # besides the size, which every view carries
    "scalar": ("update_norm", "train_loss"),
    "probed": ("update_norm", "train_loss", "loss"),  # and how the global model does there
}
CLIENT_REPORTS: dict[str, tuple[str, ...]] = {
    **{name: (report,) for name, report in SKETCHES.items()},
    **NUMBERS,
}

CHOICES: dict[str, tuple[str, ...]] = {
    "input": tuple(CLIENT_REPORTS),
    "history_input": ("models", "changes"),
    "encoder": ("attention", "mlp"),
    "reward": ("level", "change"),
    "identity": ("table", "hashed", "none"),
    "q_output": ("scalar", "per_class"),
    "per_class_score": ("mean", "min"),
    "q_clip": ("none", "tanh", "clamp"),
    "optimizer": ("adam", "sgd"),
    "loss": ("smooth_l1", "mse"),
    "exploration": ("all", "partial"),
}

LEAST: dict[str, float] = {  # smallest allowed values
    "history": 1,
    "heads": 1,
    "d_token": 2,  # a token is normalised: of one float nothing is left
    "identity_dim": 1,
    "identity_buckets": 1,
    "n_step": 1,
    "batch_size": 1,
    "updates_per_round": 0,
    "learn_start": 1,
    "partial_random": 1,
    "weight_decay": 0,
    "grad_clip": 0,
    "aux_weight": 0,
    "epsilon_decay": 0,
    "turns": 0,
    "loss_lean": 0,
}

SHARES: dict[str, tuple[bool, bool]] = {  # numbers from 0 to 1: may they be 0, may they be 1?
    "gamma": (True, False),
    "tau": (False, True),
    "epsilon_min": (True, True),
}

ARCHITECTURE: tuple[str, ...] = (  # a policy fits only an agent that agrees on all of these
    "input",
    "standardise",
    "normalise_history",
    "history",
    "history_input",
    "d_token",
    "heads",
    "encoder",
    "spatial_attention",
    "temporal_attention",
    "identity",
    "identity_dim",
    "identity_buckets",
    "advantage_context",
    "q_output",
)

PRESETS: dict[str, dict[str, Any]] = {
    "tuned": {  # sees what means the same in every federation: `fedglimpse teach` can teach it
        "input": "probed",
        "identity": "none",
        "reward": "change",
        "n_step": 1,
        "gamma": 0.5,
        "batch_size": 64,
    },
    "tuned-1": {},
    "paper": {
        "input": "abs",
        "standardise": False,
        "normalise_history": False,
        "advantage_context": False,
        "loss": "mse",
        "optimizer": "sgd",
        "d_token": 128,
        "targets_once": False,
    },
    "released": {
        "input": "scalar",
        "q_output": "per_class",
        "gamma": 0.97,
        "tau": 0.0075,
        "buffer": 640,
        "aux_weight": 0.15,
        "exploration": "partial",
        "learn_start": 39,
        "d_token": 128,
        "heads": 2,
        "targets_once": False,
        "identity_decay": True,
    },
}
