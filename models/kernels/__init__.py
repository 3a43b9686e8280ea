"""Kernels for a processor that XLA cannot express, called from inside a program.

A layer asks `kernels_in_use`, and then `loopfeed.models.kernels.onednn` whether it has a faster kernel. A kernel runs
where the program runs and moves no data, so its call is no crossing between host and device.
"""

from loopfeed.models.kernels.choice import ONEDNN, XLA, kernels_in_use, using_kernels
from loopfeed.models.kernels.onednn.library import MissingKernelsError

__all__ = ["ONEDNN", "XLA", "MissingKernelsError", "kernels_in_use", "using_kernels"]
