"""One result against its reference: errors measured in budgets, forms, the level reached, several outputs together."""
