"""Settings that fedglimpse no longer has, and what becomes of configurations that name them.

To retire a setting, delete its field and add it to `KEYS`; to retire one value of a setting that
stays, add that to `VALUES`. A configuration that is to run may name a retired setting at its
default, which is dropped; any other value is refused with the tag that still runs it. Reading a
stored run (`loading.read_stored`) shows every value as it was stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedglimpse.errors import UserError

TAG = "study-2026"  # the last commit that runs everything that is retired here


@dataclass(frozen=True)
class Retired:
    """A setting that was deleted.

    Attributes:
        default: what it meant to leave it out, which the code still does.
        lesson: one line on what was learned, or where the results are.
        tag: the git tag that still runs it.
    """

    default: Any
    lesson: str
    tag: str = TAG


KEYS: dict[str, Retired] = {
    "log.wandb": Retired("", "it is now log.own=log_to_wandb:WandbSink, of examples/"),
    "log.mlflow": Retired("", "it is now log.own=log_to_mlflow:MlflowSink, of examples/"),
    "agent.turns": Retired(0.0, "selections spread, but accuracy was not significantly higher"),
    "agent.loss_lean": Retired(
        0.0, "it gained early, as much as the same lean without any learning does"
    ),
    "agent.flat_start": Retired(
        False, "with turns it was within noise of random selection, never above"
    ),
    "agent.prove": Retired(
        False, "it took the harm of noisy Q-values away by selecting at random, and no more"
    ),
    "agent.history_input": Retired(
        "models", "changes in place of models made accuracy significantly lower"
    ),
    "agent.encoder": Retired(
        "attention", "without any attention accuracy was a little lower, not significantly"
    ),
    "agent.identity_buckets": Retired(4096, "it belonged to agent.identity=hashed"),
    "agent.q_clip": Retired("none", "no preset and no study bounded the Q-values"),
    "agent.reset_on_gap": Retired(False, "no preset and no study had rounds missing"),
}

# key -> value -> what to know about that value; `default` is the value that replaces it.
VALUES: dict[str, dict[Any, Retired]] = {
    "agent.identity": {
        "hashed": Retired("table", "it was within noise of the table and of no identity at all"),
    },
}


def is_retired(key: str, value: Any) -> bool:
    """True for a deleted key, and for a deleted value of a key that still exists."""
    return key in KEYS or _entry(key, value) is not None


def without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without retired keys that have the value the code still has.

    Two runs that differ only in these had the same settings.
    """
    return {key: value for key, value in values.items() if not _dropped(key, value)}


def runnable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run to start, or raise UserError for a retired one."""
    live = without_defaults(values)
    for key, value in live.items():
        entry = _entry(key, value)
        if entry is not None:
            raise UserError(
                f"{key}={value} was retired ({entry.lesson}): check out the git tag {entry.tag} to "
                f"run it, or leave {key} out.",
                key=key,
            )
    return live


def _entry(key: str, value: Any) -> Retired | None:
    """Return why a value is refused; None for one that is not."""
    if key in KEYS:
        return KEYS[key]
    if key in VALUES and isinstance(value, str | bool | int | float):
        return VALUES[key].get(value)
    return None


def _dropped(key: str, value: Any) -> bool:
    if key not in KEYS:
        return False
    default = KEYS[key].default
    both_numbers = _is_number(value) and _is_number(default)
    return value == default and (type(value) is type(default) or both_numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
