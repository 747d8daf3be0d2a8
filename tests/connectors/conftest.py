"""One thread for torch: the tests copy small tensors many times."""

import torch

torch.set_num_threads(1)
