"""Settings: the tree of keys, how it is filled, what values are legal.

Begin with `schema.py` (every key, its default and its meaning), then `loading.py`. May import
`agent.config`, `federation` and `errors`.
"""
