"""What several seeds can tell, and what they cannot."""
