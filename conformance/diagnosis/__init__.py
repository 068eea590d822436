"""What a wrong result is explained by: candidate faults are tested against it, never guessed."""
