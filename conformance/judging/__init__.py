"""One case on one kernel, from inputs to result: launches, comparison, pins, and proof that the case can fail."""
