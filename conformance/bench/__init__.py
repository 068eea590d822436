"""The benchmark lane: how fast is a kernel that has just been found right, and how far from the hardware."""
