"""Methods: who is chosen, how updates merge, what clients minimise; one readable file each.

Begin with `fedavg.py`, then `base.py`, which method files build on; `registry.py` finds a method by
name, `build.py` builds it, `descriptions.py` is the table of `fedglimpse methods`, and `learners/`
holds the learners that several compared methods share. May import `agent`,
`config`, `errors`, `federation`, `fields`, `plugins`, `rng` and `types`.
"""
