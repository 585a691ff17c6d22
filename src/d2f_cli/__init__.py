"""The command line `d2f`. A package of its own, so that `d2f --help` need not import torch, as `d2f_hf` does."""
