"""Local training on a CUDA device: Triton kernels, compiled losses and CUDA graphs.

Begin with `trainer.py` (a round as replays of one captured step), then `captured.py` (that step)
and `channels_last.py` (the forward pass). `conv.py`, `first_layer.py` and `relu_norm.py` are the
operators it uses, each with its Triton kernels in a file beside it. May import `config`, `data`,
`federation` and the rest of `simulation`; imported only where there is a GPU with Triton
(`trainers/choose.py`), except for `operator_names.py`.
"""
