"""The same methods on real devices: a two-phase federation on Flower.

Needs the extra `fedglimpse[flower]`. A device imports `fedglimpse.flower.client`, a server
`fedglimpse.flower.strategy`. This room may import every room below `studies`; no other room imports
it, nor `flwr`.

Begin with `messages` (what travels), then follow one round: `server` runs the rounds, `round` asks,
selects and aggregates, `requests` talks to the clients of a round and checks their replies. The
other side is `client` and `device`. `handshake` and `clients` know who is online and who they are,
`exchange` delivers, `deployment` holds what a server is made of, `round_log` writes the records.
"""
