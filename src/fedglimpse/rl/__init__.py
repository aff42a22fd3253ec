"""The reinforcement-learning parts that methods are built from."""
