"""The paper's agent: a spatio-temporal attention Q-network, its replay memory and its learner.

Everything has a first dimension R for lanes: federations that run side by side, whose agents score
clients and learn in one pass, each with its own weights and rounds. One agent is R = 1. Begin with
`network.py` (`QNetwork.forward` is the whole network, `layers.py` its parts) and `agent.py`
(`Agents` puts the pieces together); `learner.py` has the update, `memory.py` the remembered rounds,
`inputs.py` what the network reads. May import `errors`, `fields`, `rng` and `types`; knows nothing
of the simulator, of run folders or of the other methods.
"""
