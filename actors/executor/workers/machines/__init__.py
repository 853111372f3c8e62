"""Workers on other machines: a listener at the coordinator, hosts that start workers, and the connections between them."""
