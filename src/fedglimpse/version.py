"""Versions, on their own so that packaging can read them without importing torch."""

VERSION = "0.1.0"

# Which draws by weights and from Dirichlet distributions results were made with: 1 are torch's
# `multinomial` and its gamma distribution, 2 are `sample`, `choices` and `dirichlet` of `rng.py`.
# Other numbers in the same places need another version.
DRAWS = 2
