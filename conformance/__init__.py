"""Differential conformance testing of Mixture-of-Experts GPU kernels.

``@kernel`` registers an implementation under test; everything else is run through pytest (see README) or
``python -m conformance``.
"""

from conformance.errors import ConformanceError, NotSupported
from conformance.kernel import Kernel, kernel, report_path

__all__ = ["ConformanceError", "Kernel", "NotSupported", "kernel", "report_path"]
