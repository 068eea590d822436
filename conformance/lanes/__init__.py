"""How far a case goes on an architecture that is not here: routed, lowered, assembled."""
