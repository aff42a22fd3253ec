"""Local training on any device.

`serial.py` is the plain reference; the others train many clients in one batch and are tested
against it. Begin with `jobs.py` (what a trainer is asked), then `serial.py`. May import what
`simulation` may.
"""
