"""One torch thread for every test: tests run side by side, and small tensors gain nothing."""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"  # what `engine.threads=auto` obeys, in processes of tests too
torch.set_num_threads(1)
