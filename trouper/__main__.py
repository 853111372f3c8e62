"""Start the command line, for `trouper` and `python -m trouper`."""

import atexit
import gc
import os
import sys


def start() -> None:
    """Run the command line.

    Importing its modules takes a while.  Ctrl-C during that time ends the process with status 130 and
    one line instead of a traceback, like Ctrl-C at any later time.
    """
    end = _End()
    try:
        from trouper.frontends.cli.main import main
    except KeyboardInterrupt:
        sys.stderr.write("trouper: interrupted\n")
        sys.stderr.flush()
        # An ordinary exit would run clean-up code of half-imported modules, which may fail.
        os._exit(130)
    try:
        main()
    except SystemExit as status:
        end.code = int(status.code or 0)
        raise


class _End:
    """Skips the shutdown of the interpreter, at which triton would report all objects in `gc.freeze`'s set as leaks.

    Exit functions run in reverse order of registration, so this one must be registered first.  If the process already has an exit
    function, for example one of a program that calls `start`, the interpreter shuts down as usual.
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
