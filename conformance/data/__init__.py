"""How inputs are drawn: the same random bits everywhere, values, routing, layouts, exact arithmetic on them."""
