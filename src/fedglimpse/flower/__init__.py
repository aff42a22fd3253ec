"""The same methods on real devices: a two-phase federation on Flower.

Needs the extra `fedglimpse[flower]`. A device imports `fedglimpse.flower.client`, a server
`fedglimpse.flower.strategy`; nothing else in the package knows Flower.
"""
