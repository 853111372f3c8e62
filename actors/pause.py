"""What may be planned.  Source: spec sections 5.2 and 10.1."""

from enum import Enum


class Pause(Enum):
    NONE = "none"
    NEW = "new"  # what has run before runs on; nothing new starts
    ALL = "all"  # nothing is planned
