"""Which cases there are and which are run: matrices and their files, coverage, options, the plan and its rounds."""
