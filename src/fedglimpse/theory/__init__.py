"""The terms of the paper's convergence bound, measured on runs (docs/theory.md).

Begin with `panel.measure_run`, which is what `fedglimpse theory RUN` calls: it rebuilds the
federation of a run and measures every stored model with `estimate`, and `bound` makes the terms of
the theorem out of that. `text` prints one run, `rank` compares several. The room may import `runs`,
`simulation`, `data`, `config` and what they stand on; only the command line imports it.
"""
