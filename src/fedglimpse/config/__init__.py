"""Settings: the tree of keys, how it is filled, what values are legal.

Begin with `schema.py` (every key, its default and its meaning), then `loading.py`. May import
`agent.config`, `data`, `federation`, `fields` and `errors`; the groups `agent.*`, `data.*` and
`visibility.*` are declared in their own rooms.
"""
