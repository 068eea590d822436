"""Differential conformance testing of Mixture-of-Experts GPU kernels.

``@kernel`` registers an implementation under test; everything else is run through pytest (see README) or
``python -m conformance``.

The modules beside this one are what kernels, operators and users name. The subpackages hold the rest, one idea each,
and import one another only downwards, from the last of these to the first (`tests/test_layering.py`):

    data            how inputs are drawn
    expectations    what architectures are expected to do, as rules
    cases           which cases there are, and which are run
    launching       one launch of a kernel, with guards around it
    verdicts        one result against its reference
    diagnosis       what a wrong result is explained by
    judging         one case on one kernel, from inputs to result
    lanes           architectures that are not here: routed, lowered, assembled
    devices         memory and GPUs, shared by the processes of a run
    bench           how fast a kernel is that was found right
    runs            record files, and several runs as one
    zoo             the run of kernels that are wrong on purpose
    session         one pytest session: controller and workers; `plugin` hooks it into pytest
    commands        the command line
"""

from conformance.decorator import kernel
from conformance.errors import ConformanceError, NotSupported
from conformance.kernel import Kernel, report_path

__all__ = ["ConformanceError", "Kernel", "NotSupported", "kernel", "report_path"]
