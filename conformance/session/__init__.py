"""One pytest session: items, workers and their crashes, compiling ahead, time limits, progress, what is recorded."""
