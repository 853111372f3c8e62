"""The process of `trouper` and `python -m trouper`, from its first import on."""

import os
import sys


def start() -> None:
    """Run the command line.

    Its modules take a while to import.  Ctrl-C during that time ends the process with status 130
    and one line, as it does later, instead of a traceback.
    """
    try:
        from trouper.frontends.cli.main import main
    except KeyboardInterrupt:
        sys.stderr.write("trouper: interrupted\n")
        sys.stderr.flush()
        os._exit(130)  # what was read half is not to be torn down
    main()


if __name__ == "__main__":
    start()
