"""The process of `trouper` and `python -m trouper`, from its first import on."""

import atexit
import gc
import os
import sys


def start() -> None:
    """Run the command line.

    Its modules take a while to import.  Ctrl-C during that time ends the process with status 130
    and one line, as it does later, instead of a traceback.
    """
    end = _End()
    try:
        from trouper.frontends.cli.main import main
    except KeyboardInterrupt:
        sys.stderr.write("trouper: interrupted\n")
        sys.stderr.flush()
        os._exit(130)  # what was read half is not to be torn down
    try:
        main()
    except SystemExit as status:
        end.code = int(status.code or 0)
        raise


class _End:
    """Skips the interpreter's end, where triton lists all objects that `gc.freeze` has kept from it as leaks.

    The exit function that is registered first runs last, so this one must be the first.  If the process has one already, for
    example of a program that calls `start`, the interpreter ends as usual.
    """

    def __init__(self) -> None:
        self.code = 1
        if not atexit._ncallbacks():  # pyright: ignore[reportPrivateUsage]
            atexit.register(self._run)

    def _run(self) -> None:
        if gc.get_freeze_count() and "triton" in sys.modules:
            # Other exit functions may have printed.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


if __name__ == "__main__":
    start()
