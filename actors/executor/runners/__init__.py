"""The model runners: they compute the steps of plans on one device, without scheduling state."""
