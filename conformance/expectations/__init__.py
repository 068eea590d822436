"""What is expected of kernels on each architecture: rules as data, their checks, and what contradicts them."""
