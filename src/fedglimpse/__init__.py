"""Federated learning when the server can only see some of its clients each round."""
