"""What a repeated call is found by, and what it repeats beside launches."""
