"""The whole engine, simulated: virtual time, drawn schedules and faults, a device that cannot be fooled."""
