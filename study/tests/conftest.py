"""One torch thread for every test: tests run side by side, and small tensors gain nothing."""

import torch

torch.set_num_threads(1)
