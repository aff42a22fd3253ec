"""The presets, and what suits each dataset. Dotted keys over the defaults of `config/schema.py`.

`tuned`: what a run has unless it says otherwise, what measurements chose of what is free.
`tuned-1`: `tuned` as it was for the study of study/, the defaults of
`config/schema.py`. `paper`: the paper's text, wherever the text speaks.
`released`: the defaults of the authors' code, without its bugs (docs/presets.md lists both).
`taught`: the name that the agent of `tuned` had before it was that.
"""

from __future__ import annotations

from typing import Any

from fedglimpse.agent.config import PRESETS as AGENT_PRESETS

DEFAULT_PRESET = "tuned"
VALUES_ALONE = ("tuned", "tuned-1", "taught")  # names that no method asks for, so values say it all

PRESETS: dict[str, dict[str, Any]] = {
    "tuned": {},
    "tuned-1": {},
    "paper": {
        "local.optimizer": "sgd",
        "local.lr": 0.001,
        "local.batch_size": 64,
        "aggregate.window": 5,
        "aggregate.source": "smoothed",
        "sketch.parameters": "all",
        "sketch.scale": "mean",
    },
    "released": {
        "local.optimizer": "adam",
        "local.lr": 0.001,
        "local.batch_size": 256,
        "local.proximal_mu": 0.0005,
        "local.proximal_squared": False,
        "data.equal_size": False,
        "data.exact_classes": False,
        "data.proxy_source": "leaky_train",
        "visibility.min_visible": 2,
        "aggregate.window": 6,
        "aggregate.source": "raw",
    },
}

for _name, _values in AGENT_PRESETS.items():
    PRESETS[_name] |= {f"agent.{key}": value for key, value in _values.items()}
PRESETS["taught"] = PRESETS["tuned"]

_SUBJECTS: dict[str, Any] = {"data.partition": "subject", "data.clients": 0, "rounds": 600}

DATASET_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"data.clients": 40, "rounds": 100, "local.batch_size": 16, "local.lr": 0.05},
    "synthetic": {"data.clients": 40, "rounds": 100, "local.lr": 0.05},
    "cifar10": {"rounds": 1500, "local.augment": True},
    "fashion": {"rounds": 600},
    "har": _SUBJECTS,
    "hapt": _SUBJECTS,
}
