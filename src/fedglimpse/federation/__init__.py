"""What every federation consists of, simulated or real.

Who is visible and its settings (`visibility.py`, `availability.py`, `traces.py`), client
models and their flat states (`models.py`, `state.py`), what clients may report (`reports.py`,
`sketches.py`), how updates merge (`aggregation.py`), what a round costs (`costs.py`), the device
and its numeric precision (`devices.py`). Begin with `aggregation.py`. May import `errors`,
`fields`, `plugins`, `rng` and `types`.
"""
