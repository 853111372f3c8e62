"""Measurements of single operations against the peak rates of the machine."""
