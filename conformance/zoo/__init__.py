"""The bug zoo: kernels that are wrong on purpose, run to prove that the suite sees each fault and names it."""
