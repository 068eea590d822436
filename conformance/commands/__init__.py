"""The command line beside pytest: a module per command, or per family of them, and what they share."""
