"""Pages from files of timings: how fast, how far from the hardware, faster than what by how much, and what is noise.

As everywhere in this folder, files are all that is read.
"""
