"""Local training on any device: every trainer turns the jobs of a round into trained models.

`serial.py` is the plain reference; `batched.py` (with `stacked.py` and `optimizers.py`) and
`simulation/cuda/` train many clients at once and are tested against it. Begin with `jobs.py` (what
a trainer is given and returns), then `serial.py`; `choose.py` picks the trainer for a model and a
machine. May import `config`, `data`, `federation` and `simulation/many_models.py`; and
`simulation/cuda/` inside functions alone, where there is a GPU.
"""
