"""The simulated federation: several lanes of clients that train, report and are evaluated together.

Begin with `world.py`, whose five methods are a round; `lane.py` says what happens in one lane,
`local_training.py` who trains from which state. `trainers/` and `cuda/` do the arithmetic of local
training. May import `data`, `federation`, `config` and the root; knows no method, no file and no
configuration key.
"""
