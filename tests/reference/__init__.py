"""The truth the tests compare with: a plain PyTorch loop, and comparisons of every element.

Nothing here imports the package under test.
"""

from .cases import EPOCHS, Case, all_cases, pairwise
from .compare import Snapshot, assert_close, assert_identical, assert_same_losses, over_a_run, within_a_step
from .lockstep import follow
from .loop import HostGradientLoop, ReferenceLoop

__all__ = [
    "EPOCHS",
    "Case",
    "HostGradientLoop",
    "ReferenceLoop",
    "Snapshot",
    "all_cases",
    "assert_close",
    "assert_identical",
    "assert_same_losses",
    "follow",
    "over_a_run",
    "pairwise",
    "within_a_step",
]
