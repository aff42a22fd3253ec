"""The paper's agent: a spatio-temporal attention Q-network, its replay memory and its learner.

Begin with `network.py` (the Q-network) and `agent.py`. May import `federation`, `errors`, `rng`,
`types`; knows nothing of the simulator, of files or of the other methods.
"""
