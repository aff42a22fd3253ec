"""The paper's convergence bound: its terms on exact problems, and measured on real runs."""
