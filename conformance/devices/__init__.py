"""Memory and GPUs as the processes of a run share them: what is free, who is admitted, which GPU each gets."""
