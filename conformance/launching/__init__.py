"""One launch of a kernel: the ways to launch it, guards around its buffers, and what it changes put back."""
