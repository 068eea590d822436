"""Golden references and oracles: one module per operator, each defining ``OPERATOR``. Plain PyTorch, eager."""
