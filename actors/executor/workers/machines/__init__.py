"""Workers on other machines: a listener at the front, hosts that start workers, and the connections between them."""
