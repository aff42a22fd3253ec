"""The statements of the paper's Section IV, checked exactly on quadratic problems.

Begin with `statements`, which checks every lemma and the theorem on many random federations.
`quadratics` holds the problems, `training` follows federated SGD on them in closed form, `lemmas`
computes both sides of each lemma. The bound itself is the library's, `fedglimpse.theory.bound`,
and these modules may import nothing else of the library but `rng` and `theory`. Shapes: B
federations are computed at once, each of N clients in p dimensions; a cluster has V visible
clients, K of them chosen.
"""
