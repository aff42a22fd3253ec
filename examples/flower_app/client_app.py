"""The client: trains on its own data, sends a few numbers, and its model when it is chosen."""

from task import make_model, my_data

from fedglimpse.flower.client import client_app

app = client_app(make_model, data=my_data)
