"""Operators of torchvision, declared before a framework imports it for its datasets.

Where torchvision was built for another PyTorch (CUDA beside a CPU build, say), its compiled
operators do not load, and its import fails unless they are declared. None is called here.
"""

import torch

DECLARED = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        DECLARED.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
