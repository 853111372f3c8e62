"""The process of `trouper` and `python -m trouper`, from its first import on."""

import os
import sys


def start() -> None:
    """Run the command line; Ctrl-C while its modules are still read ends it as it does later."""
    try:
        from trouper.frontends.cli.main import main
    except KeyboardInterrupt:
        sys.stderr.write("trouper: interrupted\n")
        sys.stderr.flush()
        os._exit(130)  # what was read half is not to be torn down
    main()


if __name__ == "__main__":
    start()
