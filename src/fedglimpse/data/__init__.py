"""Real data: where it is, how it is split, who holds what."""
